"""Perplexity of a text through compressed caches, window by window, as records."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.evals.asking.clock import PrefillClock
from lowrank_kv_jax.evals.asking.methods import bases_of, calibration_settings, check_methods, conditions_of
from lowrank_kv_jax.evals.perplexity.score import score_many
from lowrank_kv_jax.evals.results.records import append_record, make_record
from lowrank_kv_jax.evals.results.resume import finished, key_of
from lowrank_kv_jax.evals.results.sizes import size_fields
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

COMMAND = "eval perplexity"
MODES = ("stream", "sliding")
LARGEST = 700
"""Nats of a token whose perplexity a float still holds."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A piece of text: what is prefilled and compressed, and what is scored through the cache after it."""

    index: int
    context: tuple[int, ...]
    scored: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.context), len(self.scored)


def check_step(length: int, step: int) -> None:
    """Raise ValueError unless a step leaves something of a window of `length` tokens."""
    if not 1 <= step < length:
        raise ValueError(f"step={step}: must lie in 1..{length - 1} for windows of {length} tokens")


def cut_windows(tokens: Sequence[int], mode: str, length: int, step: int) -> list[Window]:
    """Windows of at most `length` tokens over a text.

    Args:
        mode: "stream": disjoint windows; the first `step` tokens of each are compressed and the rest is
            scored as a stream through the cache, token after token. "sliding": windows that start `step`
            tokens apart; of each, only what no earlier window held is scored, and in the first one all but
            its first token. With the full cache this is the strided perplexity that transformers'
            documentation describes.

    Raises:
        ValueError: an unknown mode, a step outside of the window, or a text that is too short for one.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: must be {' or '.join(MODES)}")
    check_step(length, step)
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens: must have at least 2")
    if mode == "stream" and length > len(tokens):
        raise ValueError(f"length={length}: must be at most {len(tokens)}, as many as the text has tokens")
    ids = tuple(tokens)
    if mode == "stream":
        begins = range(0, len(ids) - length + 1, length)
        return [Window(i, ids[b : b + step], ids[b + step : b + length]) for i, b in enumerate(begins)]
    windows, scored = [], 1
    for begin in range(0, len(ids), step):
        end = min(begin + length, len(ids))
        windows.append(Window(len(windows), ids[begin:scored], ids[scored:end]))
        scored = end
        if end == len(ids):
            break
    return windows


def evaluate_perplexity(
    model: Any, methods: Mapping[str, Part], text: Corpus | None = None, mode: str = "stream",
    length: int = 2048, step: int = 1024, windows: int | None = 4, *, json: str | os.PathLike | None = None,
    rows: int = 4, dtype: str | None = None, calibrate: Corpus | None = None, progress: bool = False,
    mesh: Any = None, cut: Sequence[Window] | None = None, prefill_chunk: int | None = None, block: int | None = None,
) -> list[dict[str, Any]]:
    """Score methods on a text.

    Args:
        model: a `LoadedModel` with a tokenizer.
        methods: by spec.
        text: its documents are put one behind the other; by default the second half of Python's language
            reference.
        mode, length, step: see `cut_windows`.
        windows: the first so many; None for all.
        json: one record a window and method is appended; those that the file holds are not computed again.
        rows: windows that share a batch.
        cut: windows that are cut already; `text` then names where they are from, and `mode` their task.
        prefill_chunk: `chunk` of `prefill`.
        block: `block` of `prefill`, for all methods; None: each has its own.

    The other arguments are those of `evaluate_ruler`.

    Returns:
        One record for each window and method, with `nll` (in nats, the sum over `scored_tokens`),
        `perplexity` and, where `full` is among the methods, `divergence` (see `divergence`, nats, the mean
        over scored tokens; None where it is not finite, too, and `compared` says whether it was measured); `ttft_s` is
        the prefill's, whose logits predict the first token, and `scored_tokens_per_s` counts all rows of the batch.

    Raises:
        ValueError: as `cut_windows`, windows beyond the model's context, or a file that holds results of
            another run.
    """
    check_methods(model, methods, COMMAND)
    if length > model.config.context:
        raise ValueError(f"length={length}: the model's context is {model.config.context} tokens")
    if block is not None:
        check_int("block", block, 1)
    text = text or load_corpus("pydoc:second")
    if cut is None:
        ids = model.tokenizer("\n\n".join(text.texts), verbose=False).input_ids
        cut = cut_windows(ids, mode, length, step)[:windows]
    corpus, dtype = calibrate or load_corpus("pydoc:first"), dtype or default_cache_dtype()
    conditions = {
        "step": step, "weights_dtype": weights_dtype(model), "cache_dtype": dtype, "prefill_chunk": prefill_chunk,
        "block": block, "text": {"name": text.name, "sha256": text.sha256}, **calibration_settings(corpus, methods),
    }
    run = _Run(model, f"perplexity-{mode}", length, conditions)
    known = {} if json is None else finished(json, run.wanted(methods, cut))
    if _full(methods):  # left from a run without it, which had nothing to compare with: scored once more
        known = {key: own for key, own in known.items() if own["nll"] is None or own.get("divergence") is not None
                 or own.get("compared")}
    batches = [(batch, left) for batch in _batches(cut, rows) if (left := run.left(methods, batch, known))]
    if batches:
        needed = {spec: m for spec, m in methods.items() if any(spec in left for _, left in batches)}
        bases = bases_of(model, needed, corpus, dtype=dtype, progress=progress)
        with ProgressBar(COMMAND, sum(len(left) for _, left in batches), progress) as bar:
            for batch, left in batches:
                for record in run.score(batch, left, bases, rows, dtype, mesh, bar):
                    key = key_of(record)
                    if key not in known:
                        known[key] = record
                        if json is not None:
                            append_record(json, record)
    return [known[run.key(spec, window)] for window in cut for spec in methods]


def total_perplexity(records: Sequence[Mapping[str, Any]], method: str) -> float:
    """exp of the mean over all scored tokens of a method's records, infinite beyond what a float holds."""
    own = [record for record in records if record["method"] == method]
    if any(record["nll"] is None for record in own):
        return math.inf
    mean = sum(record["nll"] for record in own) / sum(record["scored_tokens"] for record in own)
    return math.exp(mean) if mean < LARGEST else math.inf


def mean_divergence(records: Sequence[Mapping[str, Any]], method: str) -> float | None:
    """Nats a scored token of a method's records; None where one has none."""
    own = [record for record in records if record["method"] == method]
    if any(record.get("divergence") is None for record in own):
        return None
    return sum(record["divergence"] * record["scored_tokens"] for record in own) / sum(r["scored_tokens"] for r in own)


def _mean(divergence: np.ndarray | None, row: int) -> float | None:
    mean = math.nan if divergence is None else float(divergence[row].mean())
    return mean if math.isfinite(mean) else None


@dataclasses.dataclass(frozen=True)
class _Run:
    """What all records of a run have in common."""

    model: Any
    task: str
    length: int
    conditions: Mapping[str, Any]
    warm: set[tuple[str, tuple[int, int]]] = dataclasses.field(default_factory=set)

    def key(self, spec: str, window: Window) -> tuple:
        return COMMAND, self.model.fingerprint, spec, self.task, self.length, window.index, None, None

    def wanted(self, methods: Mapping[str, Part], windows: Sequence[Window]) -> dict[tuple, dict[str, Any]]:
        """The keys of this run's records, and what each of these must hold."""
        return {self.key(spec, window): {**conditions_of(self.conditions, method), "window_sha256": _digest(window)}
                for window in windows for spec, method in methods.items()}

    def left(self, methods, batch: Sequence[Window], known) -> dict[str, Part]:
        """The methods that a batch still needs, and the full cache, which their predictions are compared with."""
        left = {spec: m for spec, m in methods.items() if any(self.key(spec, w) not in known for w in batch)}
        return _full(methods) | left if left else {}

    def score(self, batch, methods, bases, rows, dtype, mesh, bar) -> Iterator[dict[str, Any]]:
        model = self.model
        filled = [batch[i % len(batch)] for i in range(rows)]  # one shape, whether the batch is full or not
        tokens = np.asarray([window.context + window.scored for window in filled], np.int32)
        clock = PrefillClock()
        found = score_many(model, methods, tokens, len(batch[0].context), bases=bases, dtype=dtype, mesh=mesh,
                           clock=clock, prefill_chunk=self.conditions["prefill_chunk"], block=self.conditions["block"])
        for spec, size, scored, seconds in found:
            nll = scored.nll
            bar.advance()
            times = self._times(clock, spec, methods, batch[0].shape, nll.size / seconds)
            for row, window in enumerate(batch):
                total = float(nll[row].sum())
                finite = math.isfinite(total)
                yield make_record(
                    COMMAND, model=model.name, fingerprint=model.fingerprint, method=spec, task=self.task,
                    length=self.length, index=window.index, samples=1, nll=total if finite else None,
                    scored_tokens=len(window.scored), context_tokens=len(window.context),
                    perplexity=math.exp(min(total / len(window.scored), LARGEST)) if finite else None,
                    divergence=_mean(scored.divergence, row), compared=scored.divergence is not None,
                    **size_fields(size), window_sha256=_digest(window), **times,
                    **conditions_of(self.conditions, methods[spec]),
                )
        self.warm.update((spec, batch[0].shape) for spec in methods)

    def _times(self, clock: PrefillClock, spec: str, methods, shape: tuple[int, int], rate: float) -> dict[str, Any]:
        """Of a batch; None where programs were compiled meanwhile or another method had the prompt read twice."""
        known = (spec, shape) in self.warm
        each = self.conditions["prefill_chunk"] is not None
        twice = any(method.rereads for method in methods.values())
        alone = known and (each or methods[spec].rereads == twice and not methods[spec].attends_codes)
        return {"ttft_s": clock.alone(spec) if alone else None, "scored_tokens_per_s": rate if known else None}


def _full(methods: Mapping[str, Part]) -> dict[str, Part]:
    return {spec: method for spec, method in methods.items() if method.name == "full"}


def _digest(window: Window) -> str:
    return hashlib.sha256(repr((window.context, window.scored)).encode()).hexdigest()


def _batches(windows: Sequence[Window], rows: int) -> list[list[Window]]:
    """Windows of one shape together, in order."""
    if rows < 1:
        raise ValueError(f"rows={rows}: must be at least 1")
    shapes: dict[tuple[int, int], list[Window]] = {}
    for window in windows:
        shapes.setdefault(window.shape, []).append(window)
    return [same[i : i + rows] for same in shapes.values() for i in range(0, len(same), rows)]
