"""Perplexity records sorted into sections: one text on one model, windows cut in one way."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.report.statistics import Interval, ratio_interval, wilcoxon_p

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PerplexityEntry:
    """A method in a section.

    Attributes:
        method: its spec.
        windows: negative log-likelihood in nats and scored tokens of each window, by its index.
        perplexity: exp of the mean over all scored tokens, its interval from drawing windows again.
        difference: in nats per token, to the baseline over the windows that both scored.
        p: of the Wilcoxon test against the baseline.
        smaller, nominal_smaller, bytes_per_token: as in `sections.Entry`.
    """

    method: str
    windows: Mapping[int, tuple[float, int]]
    perplexity: Interval
    difference: Interval | None
    p: float | None
    smaller: float | None
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
    baseline: str | None
    entries: tuple[PerplexityEntry, ...]
    records: tuple[Record, ...]

    @property
    def title(self) -> str:
        mode = self.task.removeprefix("perplexity-")
        return f"{self.command} ({mode}), {self.model}, {self.text}, windows of {self.length} by {self.step} tokens"


def perplexity_sections(records: Sequence[Record], baseline: str) -> list[PerplexitySection]:
    """The sections of records that have an `nll`."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        text = (record.get("text") or {}).get("name", "")
        key = tuple(record.get(field) for field in ("command", "model", "task", "length", "step"))
        groups.setdefault((*key, text), []).append(record)
    return [_section(key, own, baseline) for key, own in sorted(groups.items(), key=lambda item: str(item[0]))]


def _section(key: tuple, records: list[Record], baseline: str) -> PerplexitySection:
    methods = tuple(dict.fromkeys(record["method"] for record in records))
    windows = {method: {r["index"]: (r["nll"], r["scored_tokens"]) for r in records if r["method"] == method}
               for method in methods}
    there = baseline if baseline in methods else None
    entries = tuple(_entry(method, records, windows, there) for method in methods)
    return PerplexitySection(*key, there, entries, tuple(records))


def _entry(method: str, records: list[Record], windows: Mapping, baseline: str | None) -> PerplexityEntry:
    own = [record for record in records if record["method"] == method]
    nll, tokens = (np.array(side, float) for side in zip(*windows[method].values(), strict=True))
    mean = ratio_interval(nll, tokens)
    perplexity = Interval(*(None if x is None else float(np.exp(min(x, 700.0))) for x in dataclasses.astuple(mean)))
    difference, p = None, None
    if baseline is not None and method != baseline:
        shared = [index for index in windows[method] if index in windows[baseline]]
        if shared:
            gaps = np.array([windows[method][i][0] - windows[baseline][i][0] for i in shared])
            counts = np.array([windows[method][i][1] for i in shared], float)
            difference, p = ratio_interval(gaps, counts), wilcoxon_p(gaps / counts)
    sized = [r for r in own if r.get("cache_bytes") and r.get("full_cache_bytes")]
    stored = sum(r["cache_bytes"] for r in sized)
    nominal = [r["nominal_smaller"] for r in own if r.get("nominal_smaller") is not None]
    return PerplexityEntry(
        method, windows[method], perplexity, difference, p,
        sum(r["full_cache_bytes"] for r in sized) / stored if stored else None,
        float(np.mean(nominal)) if nominal else None,
        float(np.mean([r["bytes_per_token"] for r in sized])) if sized else None,
    )
