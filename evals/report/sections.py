"""Records sorted into sections: one benchmark on one model under one protocol at one length."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.records import read_records
from lowrank_kv_jax.evals.report.perplexities import PerplexitySection, perplexity_sections
from lowrank_kv_jax.evals.report.statistics import Interval, interval, wilcoxon_p
from lowrank_kv_jax.evals.ruler.tasks import TASKS as RULER

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method in a section.

    Attributes:
        method: its spec.
        scores: by task, of each sample by its index.
        tasks: mean score of each task.
        mean: over the tasks, with its interval.
        difference: to the baseline over the samples that both answered, with its paired interval.
        p: of the Wilcoxon test against the baseline.
        smaller, nominal_smaller: ratio of bytes to a 16-bit full cache, stored and as papers count.
        bytes_per_token, ttft_s, decode_tokens_per_s: mean, and medians.
    """

    method: str
    scores: Mapping[str, Mapping[Any, float]]
    tasks: Mapping[str, float]
    mean: Interval
    difference: Interval | None
    p: float | None
    smaller: float | None
    nominal_smaller: float | None
    bytes_per_token: float | None
    ttft_s: float | None
    decode_tokens_per_s: float | None

    @property
    def samples(self) -> int:
        """Of all tasks together."""
        return sum(map(len, self.scores.values()))


@dataclasses.dataclass(frozen=True)
class Section:
    """Methods that answered the same questions.

    Attributes:
        command, model, protocol, length: what they have in common.
        baseline: the method that the others are compared with; None where it is not there.
        tasks: RULER's in their own order, others in that of the records.
        entries: of the methods, in the order of the records.
        records: all of them.
    """

    command: str
    model: str
    protocol: str | None
    length: Any
    baseline: str | None
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    records: tuple[Record, ...]

    @property
    def benchmark(self) -> tuple[str, str, str | None]:
        """What the sections of several lengths have in common."""
        return self.command, self.model, self.protocol

    @property
    def title(self) -> str:
        parts = [self.command, self.model, *([f"{self.length} tokens"] if self.length is not None else []),
                 *([self.protocol] if self.protocol else [])]
        return ", ".join(parts)

    @property
    def samples(self) -> int:
        """Of all tasks together, at most over the methods."""
        return max(entry.samples for entry in self.entries)


def read_report(
    paths: Sequence[str | os.PathLike], baseline: str = "full", tasks: Sequence[str] | None = None
) -> list[Section | PerplexitySection]:
    """The sections of result files, scores first, then perplexities.

    Args:
        paths: files of records; what holds neither a score nor a likelihood is left out.
        baseline: the method that the others are compared with, where a section has it.
        tasks: only these, where given.

    Raises:
        FileNotFoundError: no such file; ValueError: none of the files holds a result.
    """
    scored: dict[tuple, list[Record]] = {}
    likelihoods: list[Record] = []
    for path in paths:
        for record in read_records(Path(path)):
            wanted = tasks is None or record.get("task") in tasks
            if not (record.get("method") and record.get("task") and wanted):
                continue
            if record.get("score") is not None:
                key = tuple(record.get(field) for field in ("command", "model", "protocol", "length"))
                scored.setdefault(key, []).append(record)
            elif record.get("nll") is not None and record.get("scored_tokens"):
                likelihoods.append(record)
    if not scored and not likelihoods:
        raise ValueError(f"no record with a score or a likelihood in {', '.join(map(str, paths))}")
    order = sorted(scored, key=lambda key: (str(key[:3]), key[3] if isinstance(key[3], int) else 0))
    sections: list[Section | PerplexitySection] = [_section(key, scored[key], baseline) for key in order]
    return sections + perplexity_sections(likelihoods, baseline)


def read_sections(
    paths: Sequence[str | os.PathLike], baseline: str = "full", tasks: Sequence[str] | None = None
) -> list[Section]:
    """Those sections of `read_report` that hold scores."""
    return [section for section in read_report(paths, baseline, tasks) if isinstance(section, Section)]


def _section(key: tuple, records: list[Record], baseline: str) -> Section:
    tasks = tuple(sorted(dict.fromkeys(record["task"] for record in records), key=_place))
    methods = tuple(dict.fromkeys(record["method"] for record in records))
    scores = {method: _scores(records, method, tasks) for method in methods}
    there = baseline if baseline in methods else None
    entries = tuple(_entry(records, method, scores, there) for method in methods)
    command, model, protocol, length = key
    return Section(command, model, protocol, length, there, tasks, entries, tuple(records))


def _place(task: str) -> int:
    """RULER's tasks stand in their own order, others as they come."""
    return list(RULER).index(task) if task in RULER else len(RULER)


def _scores(records: list[Record], method: str, tasks: tuple[str, ...]) -> dict[str, dict[Any, float]]:
    """By task and sample. A sample is named by index and seed; the last record of one counts."""
    found: dict[str, dict[Any, float]] = {task: {} for task in tasks}
    for record in records:
        if record["method"] == method:
            sample = tuple(record.get(field) for field in ("seed", "index", "depth"))
            found[record["task"]][sample] = record["score"]
    return {task: values for task, values in found.items() if values}


def _entry(records: list[Record], method: str, scores, baseline: str | None) -> Entry:
    own = [record for record in records if record["method"] == method]
    arrays = [np.array(list(values.values()), float) for values in scores[method].values()]
    difference, p = None, None
    if baseline is not None and method != baseline:
        pairs = _differences(scores[method], scores[baseline])
        if pairs:
            difference, p = interval(pairs), wilcoxon_p(np.concatenate(pairs))
    stored, full = (_total(own, field) for field in ("cache_bytes", "full_cache_bytes"))
    return Entry(
        method, scores[method], dict(zip(scores[method], (float(array.mean()) for array in arrays),
                                         strict=True)),
        interval(arrays), difference, p, full / stored if stored and full else None,
        _mean(own, "nominal_smaller"),
        _mean(own, "bytes_per_token"), _median(own, "ttft_s"), _median(own, "decode_tokens_per_s"),
    )


def _differences(own: Mapping, other: Mapping) -> list[np.ndarray]:
    """By task, over the samples that both have."""
    shared = {task: [name for name in values if name in other.get(task, ())] for task, values in own.items()}
    return [
        np.array([own[task][name] - other[task][name] for name in names])
        for task, names in shared.items() if names
    ]


def _values(records: list[Record], field: str) -> list[float]:
    return [record[field] for record in records if record.get(field) is not None]


def _total(records: list[Record], field: str) -> float | None:
    values = _values([r for r in records if r.get("cache_bytes") and r.get("full_cache_bytes")], field)
    return sum(values) if values else None


def _mean(records: list[Record], field: str) -> float | None:
    values = _values(records, field)
    return float(np.mean(values)) if values else None


def _median(records: list[Record], field: str) -> float | None:
    values = _values(records, field)
    return float(np.median(values)) if values else None
