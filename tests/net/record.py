"""What methods give on tiny models: logits and bytes, recorded once and compared after every change of the core.

    uv run --no-sync python tests/net/record.py --check --only 'snapkv'       # a table of differences
    uv run --no-sync python tests/net/record.py --only 'kv3 newmethod*'       # record these cases, keep the others

Only public functions are called: what they are made of may be replaced. Prompts are ragged, decoded tokens are given (a
greedy choice would turn rounding into another text), and steps are those of a conversation: a prompt, 40 tokens over two
refreshes, a second turn of several tokens at once, a refresh and one more token.
"""

import argparse
import fnmatch
import functools
import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: what the tests share
if __name__ == "__main__":  # programs run for milliseconds: compiling is all of the time; rounding is another, and must not matter
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import conftest  # noqa: E402  compiler flags, before jax is imported
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cases import BLOCK, CAPACITY, MODELS, PROMPT, cases  # noqa: E402
from helpers import model, prompts, random_moments  # noqa: E402

import lowrank_kv_jax as lkv  # noqa: E402

FILE = Path(__file__).with_name("net.json.gz")
LENGTHS = np.array([PROMPT, 61], np.int32)
STEPS = 40
TURN = np.array([6, 4], np.int32)  # tokens of the second turn, of each row
SHOWN = (0, STEPS, STEPS + 1)  # of the logits `[43, B, V]`: those of the prompt, of the last step and of the second turn
VOCABULARY = 8  # entries of these that are kept
SEEDS = range(4)  # of tokens: the first is taken whose logits do not jump, see `steadiest`
NUDGE = 1e-6  # of every weight, relative
STEADY = 1e-4  # largest change of a logit by such nudges, some twenty times what rounding does
TOLERANCE = 2e-4  # of logits of order 1

NAMED_CHANGES: dict[str, str] = {
    "kv8 single-svd:*decoded=coded+*": "its basis is fitted to the tokens that stay, as xkv's is; it was fitted to the whole "
    "prompt; its bases take a third fewer bytes",
    "deep xkv:group=2,rank=10,*rebuild=32*": "the page of the last stored tokens is always among those that are read",
    **{
        f"kv8 {codec}:*+{selection}:*": "each group of heads that shares a latent chooses tokens of its own; all chose "
        "together, while a cache was laid out and weighed for a choice by each group"
        for codec in ("palu", "streamingkv") for selection in ("h2o", "scissorhands", "snapkv")
    },
    **dict.fromkeys(
        ("kv8 palu:paper,*", "kv8 streamingkv:paper,*", "kv8 streamingkv:longbench-*", "kv8 streamingkv:ruler-*"),
        "presets take ranks by the rule of Palu's code; by the root of a sum of squared gradients before"),
    "kv3 osp:*tau_k=*": "adjacent chunks are merged where slots run out; the last basis stayed for all further chunks",
    "* osp:rank=*": "keys before RoPE, and calibration weighs for tokens of a chunk that are not there yet; keys after RoPE, "
    "in bases of what was seen alone (now osp:follow)",
    "* ojakv:rank=*": "keys before RoPE, in one basis of all heads, by steps anchored by what is stored; keys after RoPE, head "
    "by head, by steps that forgot (now ojakv:follow)",
    "kv3 *moments*dtype=bfloat16*": "moments are means, which 16 bits hold; they were sums",
}
"""Patterns of cases (as of --only) that differ from the record on purpose, and why."""

REFUSED_NOW: dict[str, str] = {"kv3 momentkv:*schedule=paper,decoding=keep": "it was accepted, and evicted"}
"""Patterns of cases that are refused on purpose, and what they gave."""


class Outcome(NamedTuple):
    """Of one case.

    Attributes:
        logits: float32 `[43, B, V]` after the prompt, each step, the second turn and the step behind it.
        by_kind: bytes of the cache and of the bases it is read with.
        own: bytes of the cache alone.
    """

    logits: np.ndarray
    by_kind: dict[str, int]
    own: int


class Verdict(NamedTuple):
    """Of a case against its record: whether it stands, in a word, and the particulars."""

    stands: bool
    word: str
    detail: str = ""


# ---- running ----------------------------------------------------------------------------------------------------


@functools.cache
def nudged(name: str, seed: int) -> Any:
    """The weights of a model, each changed by about `NUDGE`; as they are for seed 0."""
    params = model(MODELS[name]).params
    if not seed:
        return params
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return treedef.unflatten([x * jnp.asarray(1 + NUDGE * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def run_case(case: str, seed: int, nudge: int = 0) -> Outcome:
    """A conversation with tokens of that seed.

    Raises:
        Whatever the library raises; FloatingPointError where logits are not finite.
    """
    name, spec = case.split(" ", 1)
    config = MODELS[name]
    with jax.default_matmul_precision("highest"):
        method = lkv.parse_method(spec)
        together = method.layer_groups(config.attention) if "across" in method.reads else [(0,)]
        moments = random_moments(config, means=True, fisher=True, group=max(map(len, together)))
        bases = method.fit(config.attention, moments)
        tokens = prompts(len(LENGTHS), PROMPT + STEPS + TURN.max() + 1, seed, config.vocab_size)
        prompt, steps, turn, last = jnp.split(tokens, [PROMPT, PROMPT + STEPS, tokens.shape[1] - 1], axis=1)
        params = nudged(name, nudge)
        cache, logits = lkv.prefill(
            method, config, params, prompt, LENGTHS, bases=bases, capacity=CAPACITY, block=BLOCK, dtype=jnp.float32
        )
        seen = [logits]
        for at in range(STEPS):
            if at and at % BLOCK == 0:
                cache = lkv.refresh(method, cache, bases=bases)
            cache, logits = lkv.decode_step(method, config, params, cache, steps[:, at], bases=bases)
            seen.append(logits)
        cache, logits = lkv.extend(method, config, params, cache, turn, TURN, bases=bases)
        seen.append(logits)
        cache = lkv.refresh(method, cache, bases=bases)
        cache, logits = lkv.decode_step(method, config, params, cache, last[:, 0], bases=bases)
        found = np.stack([np.asarray(x) for x in (*seen, logits)])
    if not np.isfinite(found).all():
        raise FloatingPointError(f"logits of step {int(np.argwhere(~np.isfinite(found))[0, 0])} are not finite")
    by_kind = {kind: size for kind, size in lkv.cache_bytes(cache, bases).by_kind.items() if size}
    return Outcome(found, by_kind, lkv.cache_bytes(cache).total)


def steadiest(case: str) -> tuple[int, float, Outcome]:
    """The first seed whose logits hardly move with the weights, by how much they do, and the outcome.

    A choice of tokens, a code of few bits or a route to experts that is nearly a tie falls the other way by rounding alone:
    such a text says nothing about a change of the code.
    """
    found = []
    for seed in SEEDS:
        outcome = run_case(case, seed)
        moved = max(float(np.abs(run_case(case, seed, nudge).logits - outcome.logits).max()) for nudge in (1, 2))
        found.append((seed, moved, outcome))
        if moved <= STEADY:
            break
    return min(found, key=lambda x: x[1])


# ---- records ----------------------------------------------------------------------------------------------------


def few(logits: np.ndarray) -> np.ndarray:
    """The logits that are kept, `[3, B, 8]`."""
    at = np.arange(VOCABULARY) * logits.shape[-1] // VOCABULARY
    return logits[list(SHOWN)][..., at]


def digest(logits: np.ndarray) -> np.ndarray:
    """Of all steps `[43, B]`: sums over the vocabulary, by the root of its size so that they err as one logit does."""
    return logits.astype(np.float64).sum(-1) / logits.shape[-1] ** 0.5


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def entry_of(case: str) -> dict[str, Any]:
    """What is kept of a case."""
    try:
        seed, moved, outcome = steadiest(case)
    except Exception as error:
        return {"error": first_line(error)}
    return {
        "seed": seed,
        "moved": float(f"{moved:.1e}"),
        "logits": np.round(few(outcome.logits).astype(float), 6).ravel().tolist(),
        "argmax": outcome.logits.argmax(-1).ravel().tolist(),
        "digest": np.round(digest(outcome.logits), 6).ravel().tolist(),
        "bytes": outcome.by_kind,
        "own": outcome.own,
    }


def load() -> dict[str, dict[str, Any]]:
    """Entries by case."""
    if not FILE.exists():
        return {}
    return json.loads(gzip.decompress(FILE.read_bytes()))


def save(entries: dict[str, dict[str, Any]]) -> None:
    text = "{\n" + ",\n".join(f"{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
                              for name, entry in entries.items()) + "\n}\n"
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def matches(case: str, pattern: str) -> bool:
    """Whether a case holds the pattern, or is one by the rules of the shell."""
    return pattern in case or fnmatch.fnmatchcase(case, pattern)


# ---- comparing --------------------------------------------------------------------------------------------------


def tolerance(entry: dict[str, Any]) -> float:
    """Of logits: more only for texts that jump with rounding at every seed."""
    return TOLERANCE if entry["moved"] <= STEADY else max(TOLERANCE, 4 * entry["moved"])


def difference(entry: dict[str, Any], outcome: Outcome) -> tuple[float, str]:
    """The largest difference of logits or their digests, and where other tokens would be chosen."""
    logits = outcome.logits
    then = np.reshape(entry["logits"], few(logits).shape)
    apart = max(float(np.abs(few(logits) - then).max()),
                float(np.abs(digest(logits) - np.reshape(entry["digest"], logits.shape[:2])).max()))
    chosen = np.reshape(entry["argmax"], logits.shape[:2])
    lost = logits.max(-1) - np.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    other = np.argwhere(lost > 2 * tolerance(entry))  # less is a tie
    return apart, "" if not len(other) else f"other tokens from step {int(other[0, 0])} on"


def compare(entry: dict[str, Any], outcome: Outcome | Exception) -> Verdict:
    """Logits equal within rounding, bytes equal or fewer; what was refused may be refused, or work."""
    if "error" in entry:
        return _compare_error(entry["error"], outcome)
    if isinstance(outcome, Exception):
        return Verdict(False, "fails", first_line(outcome))
    apart, other = difference(entry, outcome)
    then, now = sum(entry["bytes"].values()), sum(outcome.by_kind.values())
    particulars = [f"logits {apart:.1e}"] + ([other] if other else [])
    if outcome.by_kind != entry["bytes"]:
        kinds = sorted(outcome.by_kind.keys() | entry["bytes"].keys())
        pairs = ((kind, entry["bytes"].get(kind, 0), outcome.by_kind.get(kind, 0)) for kind in kinds)
        moved = ", ".join(f"{kind} {a} -> {b}" for kind, a, b in pairs if a != b)
        particulars.append(f"bytes {then} -> {now} ({moved})")
    if outcome.own > entry["own"]:
        particulars.append(f"the cache alone {entry['own']} -> {outcome.own}")
    detail = "; ".join(particulars)
    if apart > tolerance(entry) or other:
        return Verdict(False, "differs", detail)
    if now > then or outcome.own > entry["own"]:
        return Verdict(False, "more bytes", detail)
    return Verdict(True, "fewer bytes" if now < then else "equal", detail)


def _compare_error(recorded: str, outcome: Outcome | Exception) -> Verdict:
    if isinstance(outcome, Outcome):
        return Verdict(True, "works now", f"was {recorded}")
    now = first_line(outcome)
    if now == recorded:
        return Verdict(True, "as refused" if recorded.startswith("ValueError") else "as broken", recorded)
    if isinstance(outcome, ValueError):
        return Verdict(True, "refused otherwise", f"{recorded} -> {now}")
    return Verdict(not recorded.startswith("ValueError"), "broken otherwise", f"{recorded} -> {now}")


def judge(case: str, entry: dict[str, Any]) -> Verdict:
    """Run a case and compare it; a change that has a name stands."""
    try:
        outcome: Outcome | Exception = run_case(case, entry.get("seed", SEEDS[0]))
    except Exception as error:
        outcome = error
    verdict = compare(entry, outcome)
    named = REFUSED_NOW if isinstance(outcome, ValueError) else {} if isinstance(outcome, Exception) else NAMED_CHANGES
    why = next((why for pattern, why in named.items() if matches(case, pattern)), None)
    if verdict.stands or why is None:
        return verdict
    return Verdict(True, "named change", f"{why} ({verdict.word}: {verdict.detail})")


# ---- the command ------------------------------------------------------------------------------------------------

_limit = 2e9


def drop_programs() -> None:
    """Between methods, once they fill another gigabyte."""
    global _limit
    if conftest.resident_bytes() > _limit:
        jax.clear_caches()
        _limit = max(_limit, conftest.resident_bytes() + 1e9)


def check(chosen: list[str], recorded: dict[str, dict[str, Any]], every: bool) -> bool:
    """Print a line a case (those that are equal only with `every`), then how many there are of each kind."""
    words: dict[str, int] = {}
    stands = True
    for case in chosen:
        drop_programs()
        verdict = judge(case, recorded[case]) if case in recorded else Verdict(False, "not recorded")
        words[verdict.word] = words.get(verdict.word, 0) + 1
        stands &= verdict.stands
        if every or verdict.word not in ("equal", "as refused", "as broken"):
            print(f"{'   ' if verdict.stands else '!! '}{verdict.word:<17} {case}\n{'':21}{verdict.detail}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in sorted(words.items())))
    return stands


def write(chosen: list[str], recorded: dict[str, dict[str, Any]]) -> None:
    """Record cases, and keep what is known of the others; written now and then, since it takes minutes."""
    order = cases()
    for index, case in enumerate(chosen):
        drop_programs()
        begin = time.perf_counter()
        recorded[case] = entry = entry_of(case)
        told = entry.get("error") or f"moved {entry['moved']:.0e} seed {entry['seed']} bytes {sum(entry['bytes'].values())}"
        print(f"{index + 1}/{len(chosen)} {time.perf_counter() - begin:.1f} s  {case}: {told}", flush=True)
        if index % 5 == 4 or index + 1 == len(chosen):
            save({case: recorded[case] for case in order if case in recorded})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="cases that hold it, or match it as a glob")
    parser.add_argument("--check", action="store_true", help="compare with the record; exit 1 where something differs")
    parser.add_argument("--all", action="store_true", help="with --check: a line for cases that are equal, too")
    parser.add_argument("--missing", action="store_true", help="record cases that are not yet recorded")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args()
    recorded = load()
    known = list(dict.fromkeys([*cases(), *recorded])) if options.check else cases()
    chosen = [case for case in known if not options.only or any(matches(case, x) for x in options.only)]
    if not chosen:
        parser.error(f"--only {options.only}: no case matches; --list names all {len(known)}")
    if options.missing:
        chosen = [case for case in chosen if case not in recorded]
    if options.list:
        print("\n".join(chosen))
        return 0
    begin, cpu = time.perf_counter(), time.process_time()
    stands = True
    if options.check:
        stands = check(chosen, recorded, options.all or len(chosen) <= 20)
    else:
        write(chosen, recorded)
    print(f"{len(chosen)} cases in {time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} s of processor, "
          f"{conftest.resident_bytes() / 1e9:.1f} GB at the end")
    return 0 if stands else 1


if __name__ == "__main__":
    sys.exit(main())
