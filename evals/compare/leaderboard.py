"""The leaderboard: every registered method at 2x, 4x and 8x on the tasks that a small model can do."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking.few_at_a_time import few_at_a_time
from lowrank_kv_jax.evals.peers.kvpress_presses import PREFIX, PRESSES
from lowrank_kv_jax.evals.peers.kvpress_run import evaluate_kvpress
from lowrank_kv_jax.evals.report.markdown import table
from lowrank_kv_jax.evals.report.sections import Entry, Section, read_sections
from lowrank_kv_jax.evals.results.sizes import nominal_smaller
from lowrank_kv_jax.evals.ruler.generate import SEED
from lowrank_kv_jax.evals.ruler.run import COMMAND, evaluate_ruler, make_suite
from lowrank_kv_jax.evals.ruler.tasks import expand_tasks
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method

RATIOS = (2, 4, 8)
COMPOSITIONS = tuple(f"kivi:bits=4+kvzip:keep={1 / ratio}" for ratio in RATIOS)
TASKS, LENGTHS, SAMPLES = ("ruler-6",), (1024, 2048), 10
TOGETHER = 12  # methods that share a prefill; their caches of `ROWS` contexts of 2K tokens fit in 8 GB
ROWS = 10  # contexts in a batch: answers that go on to the end are most of the work, and reading weights most of theirs

ASKED: Mapping[str, Any] = {"protocol": "query-agnostic", "style": "base"}
"""How its questions are asked; records of the same file under other conditions, or of another seed, are not the
leaderboard's."""


def peer_specs(ratios: Sequence[int] = RATIOS) -> list[str]:
    """kvpress' full cache and its presses at every ratio."""
    return ["full", *(f"{name}:{ratio}x" for name in PRESSES for ratio in ratios)]


def method_specs(spec: AttentionSpec, ratios: Sequence[int] = RATIOS) -> list[str]:
    """`full`, and every other registered method at those ratios that one of its fields sets; some `COMPOSITIONS`.

    A method without such a field, or whose field does not reach the ratio on paper, stands there with its defaults.
    """
    specs = ["full"]
    for name in sorted(set(REGISTRY) - {"full"}):
        found = [text for ratio in ratios if (text := _at_ratio(name, ratio, spec)) is not None]
        specs += found or [name]
    return specs + [text for text in COMPOSITIONS if _valid(text, spec) is not None]


def _at_ratio(name: str, ratio: int, spec: AttentionSpec) -> str | None:
    """The spec that brings a method to a nominal ratio, if there is one."""
    fields = {field.name for field in dataclasses.fields(REGISTRY[name])}
    # not `smaller`, which counts all bytes and refuses the prompts of RULER that are too short for it
    for field, value in (("keep", f"{1 / ratio}"), ("rank", f"{1 / ratio}"), ("bits", f"{16 // ratio}")):
        text = f"{name}:{field}={value}"
        if field in fields and (method := _valid(text, spec)) is not None and _reaches(method, ratio, spec):
            return text
    return None


def _valid(text: str, spec: AttentionSpec) -> Part | None:
    try:
        method = parse_method(text)
        method.validate(spec)
    except ValueError:
        return None
    return method


def _reaches(method: Part, ratio: int, spec: AttentionSpec) -> bool:
    """Whether further tokens are so many times smaller; bases are not there yet, and rank alone decides with them."""
    if method.calibrated:
        return True
    nominal = nominal_smaller(method, spec)
    return nominal is None or 0.75 * ratio <= nominal <= 1.34 * ratio


def run_leaderboard(
    model: Any, source: str, methods: Mapping[str, Part], peers: Sequence[str], json: str | os.PathLike,
    tasks: Sequence[str] = TASKS, lengths: Sequence[int] = LENGTHS, samples: int = SAMPLES, *,
    seed: int = SEED, draft: bool = False, calibrate: Corpus | None = None, progress: bool = False,
) -> None:
    """Append the records that the file does not hold yet.

    Args:
        model, source: the model, and what it was loaded from.
        methods: of ours, by spec.
        peers: presses of kvpress; empty without torch.
        json: records; a run that was interrupted goes on there.
        tasks, lengths, samples, seed, draft: as of `evaluate_ruler`; of a draft, `full` answers with each group of
            methods.

    Raises:
        ValueError, OSError: as `evaluate_ruler` and `evaluate_kvpress`.
    """
    # calibrated methods together, so that one run over the calibration text serves them
    ordered = {spec: methods[spec] for spec in sorted(methods, key=lambda spec: methods[spec].calibrated)}
    for group in few_at_a_time(ordered, TOGETHER):
        own = {"full": parse_method("full"), **group} if draft else group
        evaluate_ruler(model, own, tasks, lengths, samples, **ASKED, seed=seed, rows=ROWS, json=json, draft=draft,
                       calibrate=calibrate, progress=progress)
    if peers:
        # more rows than ours: torch takes twice as long for three as for one, and no longer for ten than for three
        suite = make_suite(model, tasks, lengths, samples, **ASKED, seed=seed, rows=3 * ROWS)
        evaluate_kvpress(model, source, peers, suite, json=json, progress=progress)


def leaderboard_table(
    json: str | os.PathLike, tasks: Sequence[str] = TASKS, fingerprint: str | None = None, seed: int = SEED
) -> str:
    """Markdown: a row a method, ours and the peer's, by the ratio that papers would print.

    Args:
        tasks: names of tasks and of groups of them, whose mean the score is; a method that lacks one has none.
        fingerprint: of the model, where the file holds results of several.
        seed: of the samples that count.

    Raises:
        ValueError: no records, or results that cannot stand in one table.
    """
    name, members = "+".join(tasks), expand_tasks(tuple(tasks))
    where = {"command": COMMAND, **ASKED, "seed": seed} | ({} if fingerprint is None else {"fingerprint": fingerprint})
    sections = read_sections([json], tasks=tasks, where=where)
    if len({section.length for section in sections}) < len(sections):
        raise ValueError(f"{json} holds results of several runs: {'; '.join(section.title for section in sections)}")
    rows: dict[str, dict[Any, Entry]] = {}
    for section in sections:
        for entry in section.entries:
            rows.setdefault(entry.method, {})[section.length] = entry
    header = ["method", "nominal"]
    for section in sections:
        header += [f"{head}, {section.length}" for head in ("stored", "bases apart", name)]
    lines: list[list[str]] = []
    for method, found in sorted(rows.items(), key=_place):
        nominal = next(iter(found.values())).nominal_smaller
        lines.append([f"`{method}`", "" if nominal is None else f"{nominal:.1f}x",
                      *(cell for section in sections for cell in _cells(found.get(section.length), members))])
    counted = ", ".join(f"{section.samples} at {_length(section)}{_fewer(section)}" for section in sections)
    return f"{table(header, lines)}\n\nSamples of {name}: {counted}.\n"


def _fewer(section: Section) -> str:
    """The methods that answered fewer samples than others."""
    fewer = [f"{entry.samples} of `{entry.method}`" for entry in section.entries if entry.samples < section.samples]
    return f" (only {', '.join(fewer)})" if fewer else ""


def _length(section: Section) -> str:
    """The nominal length, and the mean one: RULER fills essay tasks in steps of 500 words."""
    contexts = [record["context_tokens"] for record in section.records if record.get("context_tokens")]
    return f"{section.length} tokens" + (f" ({sum(contexts) / len(contexts):.0f} on average)" if contexts else "")


def _cells(entry: Entry | None, tasks: Sequence[str]) -> tuple[str, str, str]:
    """All bytes, those without bases that all requests share, and the score."""
    if entry is None:
        return "", "", ""
    stored, apart = ("" if size is None else f"{size:.2f}x" for size in (entry.smaller, entry.smaller_apart))
    if not set(tasks) <= set(entry.tasks):
        return stored, apart, ""
    score = f"{entry.mean.mean:.0f}"
    if entry.mean.low is not None and entry.mean.high is not None:
        score += f" [{entry.mean.low:.0f}, {entry.mean.high:.0f}]"
    return stored, apart, score


def _place(item: tuple[str, Mapping[Any, Entry]]) -> tuple:
    """By the nearest of the ratios, full caches first, the peer last, then by score."""
    method, found = item
    entry = next(iter(found.values()))
    ratio = entry.nominal_smaller or 1.0
    nearest = min((1, *RATIOS), key=lambda r: abs(r - ratio))
    return nearest, method.startswith(PREFIX), -entry.mean.mean
