"""Perplexity records sorted into sections: one text on one model, windows cut in one way."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.report.results import Conditions, Record, conditions_of, latest, same_question, sample_of
from lowrank_kv_jax.evals.report.statistics import Interval, ratio_interval, wilcoxon_p
from lowrank_kv_jax.evals.results.summary import mean_smaller

FIELDS = ("fingerprint", "weights_dtype", "cache_dtype", "prefill_chunk", "block")
"""Those of `results.CONDITIONS` that records of likelihoods have."""


@dataclasses.dataclass(frozen=True)
class PerplexityEntry:
    """A method in a section.

    Attributes:
        method: its spec.
        windows: negative log-likelihood in nats, infinite where it diverged, and scored tokens of each window, by its
            seed and index.
        perplexity: exp of the mean over all scored tokens, its interval from drawing windows again.
        difference: in nats per token, to the baseline over the windows that both scored.
        p: of the Wilcoxon test against the baseline.
        smaller, smaller_apart, nominal_smaller, bytes_per_token: as in `sections.Entry`.
    """

    method: str
    windows: Mapping[Any, tuple[float, int]]
    perplexity: Interval
    difference: Interval | None
    p: float | None
    smaller: float | None
    smaller_apart: float | None
    nominal_smaller: float | None
    bytes_per_token: float | None


@dataclasses.dataclass(frozen=True)
class PerplexitySection:
    """Methods that scored the same text; the attributes are those of `sections.Section`."""

    command: str
    model: str
    task: str
    length: int
    step: int
    text: str
    conditions: Conditions
    baseline: str | None
    entries: tuple[PerplexityEntry, ...]
    records: tuple[Record, ...]
    apart: str = ""

    @property
    def title(self) -> str:
        mode = self.task.removeprefix("perplexity-")
        apart = f", {self.apart}" if self.apart else ""
        return (f"{self.command} ({mode}), {self.model}, {self.text}, windows of {self.length} by {self.step} tokens"
                f"{apart}")


def perplexity_sections(records: Sequence[Record], baseline: str) -> list[PerplexitySection]:
    """The sections of records that have an `nll`."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        key = tuple(record.get(field) for field in ("command", "model", "task", "length", "step"))
        text, conditions = record["text"], conditions_of(record, FIELDS)
        conditions += (("text", str(text.get("sha256") or "none")[:12]),)
        groups.setdefault((*key, text.get("name", ""), conditions), []).append(record)
    return [_section(key, own, baseline) for key, own in sorted(groups.items(), key=lambda item: str(item[0]))]


def _section(key: tuple, records: list[Record], baseline: str) -> PerplexitySection:
    records = latest(records)
    scored: dict[str, dict[Any, Record]] = {}
    for record in records:
        scored.setdefault(record["method"], {})[sample_of(record)] = record
    there = baseline if baseline in scored else None
    entries = tuple(_entry(method, scored, there) for method in scored)
    return PerplexitySection(*key, there, entries, tuple(records))


def _entry(method: str, scored: Mapping[str, Mapping[Any, Record]], baseline: str | None) -> PerplexityEntry:
    own = list(scored[method].values())
    windows = {sample: (_nll(record), record["scored_tokens"]) for sample, record in scored[method].items()}
    nll, tokens = (np.array(side, float) for side in zip(*windows.values(), strict=True))
    mean = ratio_interval(nll, tokens)
    perplexity = Interval(*(None if x is None else _exp(x) for x in dataclasses.astuple(mean)))
    difference, p = None, None
    if baseline is not None and method != baseline:
        difference, p = _difference(scored[method], scored[baseline])
    sized = [r for r in own if r.get("cache_bytes") and r.get("full_cache_bytes")]
    per_token = [r["bytes_per_token"] for r in sized if r.get("bytes_per_token") is not None]
    nominal = [r["nominal_smaller"] for r in own if r.get("nominal_smaller") is not None]
    return PerplexityEntry(
        method, windows, perplexity, difference, p, mean_smaller(own, method), mean_smaller(own, method, apart=True),
        float(np.mean(nominal)) if nominal else None,
        float(np.mean(per_token)) if per_token else None,
    )


def _difference(own: Mapping[Any, Record], other: Mapping[Any, Record]) -> tuple[Interval | None, float | None]:
    """In nats per token over the windows that both scored, with its p; neither has a size where both diverged."""
    shared = [(record, other[sample]) for sample, record in own.items()
              if sample in other and same_question(record, other[sample])]
    if not shared or any(_nll(one) == _nll(two) == math.inf for one, two in shared):
        return None, None
    gaps = np.array([_nll(one) - _nll(two) for one, two in shared])
    counts = np.array([one["scored_tokens"] for one, _ in shared], float)
    if np.isposinf(gaps).any() and np.isneginf(gaps).any():
        return None, None
    return ratio_interval(gaps, counts), wilcoxon_p(gaps / counts) if np.isfinite(gaps).all() else None


def _nll(record: Record) -> float:
    return math.inf if record["nll"] is None else record["nll"]


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)
