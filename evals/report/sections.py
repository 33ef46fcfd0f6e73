"""Records sorted into sections: one benchmark on one model under one protocol at one length."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.report.perplexities import PerplexitySection, perplexity_sections
from lowrank_kv_jax.evals.report.results import (
    Conditions,
    Record,
    conditions_of,
    latest,
    read_results,
    same_question,
    sample_of,
    told_apart,
)
from lowrank_kv_jax.evals.report.statistics import Interval, interval, wilcoxon_p
from lowrank_kv_jax.evals.results.summary import mean_smaller
from lowrank_kv_jax.evals.ruler.tasks import TASKS as RULER

Asked = Mapping[str, Mapping[Any, Record]]
"""The records of a method by task and sample."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method in a section.

    Attributes:
        method: its spec.
        scores: by task, of each sample by its seed, index and depth.
        tasks: mean score of each task.
        mean: over the tasks, with its interval.
        difference: to the baseline over the samples that both answered, to the same prompt, with its paired interval.
        p: of the Wilcoxon test against the baseline.
        smaller, smaller_apart, nominal_smaller: ratio of bytes to a 16-bit full cache: of all that is stored, without the
            bases that all requests share, and as papers count.
        bytes_per_token: mean.
    """

    method: str
    scores: Mapping[str, Mapping[Any, float]]
    tasks: Mapping[str, float]
    mean: Interval
    difference: Interval | None
    p: float | None
    smaller: float | None
    smaller_apart: float | None
    nominal_smaller: float | None
    bytes_per_token: float | None

    @property
    def samples(self) -> int:
        """Of all tasks together."""
        return sum(map(len, self.scores.values()))


@dataclasses.dataclass(frozen=True)
class Section:
    """Methods that answered the same questions.

    Attributes:
        command, model, protocol, length, conditions: what they have in common.
        baseline: the method that the others are compared with; None where it is not there.
        tasks: RULER's in their own order, others in that of the records.
        entries: of the methods, in the order of the records.
        records: one of each method and sample, the last.
        apart: what tells the title from those of other sections.
    """

    command: str
    model: str
    protocol: str | None
    length: Any
    conditions: Conditions
    baseline: str | None
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]
    records: tuple[Record, ...]
    apart: str = ""

    @property
    def benchmark(self) -> tuple[str, str, str | None, Conditions]:
        """What the sections of several lengths have in common."""
        return self.command, self.model, self.protocol, self.conditions

    @property
    def title(self) -> str:
        parts = [self.command, self.model, *([f"{self.length} tokens"] if self.length is not None else []),
                 *([self.protocol] if self.protocol else []), *([self.apart] if self.apart else [])]
        return ", ".join(parts)

    @property
    def samples(self) -> int:
        """Of all tasks together, at most over the methods."""
        return max(entry.samples for entry in self.entries)


def read_report(
    paths: Sequence[str | os.PathLike], baseline: str | None = None, tasks: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
) -> list[Section | PerplexitySection]:
    """The sections of result files, scores first, then perplexities.

    Args:
        paths: files of records; what holds neither a score nor a likelihood is left out.
        baseline: the method that the others are compared with, where a section has it; by default `full`.
        tasks, where: see `read_results`.

    Raises:
        ValueError: no section has the baseline that was asked for, or as `read_results`; OSError: no such file.
    """
    scored, likelihoods = read_results(paths, tasks, where)
    groups: dict[tuple, list[Record]] = {}
    for record in scored:
        key = tuple(record.get(field) for field in ("command", "model", "protocol", "length"))
        groups.setdefault((*key, conditions_of(record)), []).append(record)
    order = sorted(groups, key=lambda key: (str(key[:3]), key[3] if isinstance(key[3], int) else 0, key[4]))
    sections: list[Section | PerplexitySection] = [_section(key, groups[key], baseline or "full") for key in order]
    sections += perplexity_sections(likelihoods, baseline or "full")
    if baseline is not None and all(section.baseline is None for section in sections):
        methods = dict.fromkeys(entry.method for section in sections for entry in section.entries)
        raise ValueError(f"baseline {baseline!r}: no record has this method, only {', '.join(methods)}")
    apart = told_apart([section.title for section in sections], [section.conditions for section in sections])
    return [dataclasses.replace(section, apart=text) for section, text in zip(sections, apart, strict=True)]


def read_sections(
    paths: Sequence[str | os.PathLike], baseline: str | None = None, tasks: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
) -> list[Section]:
    """Those sections of `read_report` that hold scores."""
    return [section for section in read_report(paths, baseline, tasks, where) if isinstance(section, Section)]


def _section(key: tuple, records: list[Record], baseline: str) -> Section:
    records = latest(records)
    tasks = tuple(sorted(dict.fromkeys(record["task"] for record in records), key=_place))
    methods = tuple(dict.fromkeys(record["method"] for record in records))
    asked = {method: _asked(records, method, tasks) for method in methods}
    there = baseline if baseline in methods else None
    entries = tuple(_entry(method, asked, there) for method in methods)
    return Section(*key, there, tasks, entries, tuple(records))


def _place(task: str) -> int:
    """RULER's tasks stand in their own order, others as they come."""
    return list(RULER).index(task) if task in RULER else len(RULER)


def _asked(records: list[Record], method: str, tasks: tuple[str, ...]) -> Asked:
    found: dict[str, dict[Any, Record]] = {task: {} for task in tasks}
    for record in records:
        if record["method"] == method:
            found[record["task"]][sample_of(record)] = record
    return {task: values for task, values in found.items() if values}


def _entry(method: str, asked: Mapping[str, Asked], baseline: str | None) -> Entry:
    scores = {task: {sample: record["score"] for sample, record in values.items()}
              for task, values in asked[method].items()}
    together = _of_same_contexts(asked.values())
    arrays = [np.array(list(values.values()), float) for values in scores.values()]
    difference, p = None, None
    if baseline is not None and method != baseline:
        pairs = _differences(asked[method], asked[baseline])
        if pairs:
            alike = together and len(set(map(len, pairs))) == 1  # no question was left out that asks something else
            difference = interval(pairs, together=alike)
            p = wilcoxon_p(np.mean(pairs, axis=0) if alike else np.concatenate(pairs))
    own = [record for values in asked[method].values() for record in values.values()]
    return Entry(
        method, scores, {task: float(array.mean()) for task, array in zip(scores, arrays, strict=True)},
        interval(arrays, together=together), difference, p, mean_smaller(own, method),
        mean_smaller(own, method, apart=True), _mean(own, "nominal_smaller"), _mean(own, "bytes_per_token"),
    )


def _of_same_contexts(asked: Iterable[Asked]) -> bool:
    """Whether every task asks the same contexts of every method, in one order: then these are what was drawn, and not
    their questions."""
    orders = {tuple(values) for own in asked for values in own.values()}
    commands = {record.get("command") for own in asked for values in own.values() for record in values.values()}
    return len(orders) == 1 and commands == {"eval retention"}


def _differences(own: Asked, other: Asked) -> list[np.ndarray]:
    """By task, over the samples that both have and that ask the same."""
    gaps = [
        np.array([record["score"] - other[task][sample]["score"] for sample, record in values.items()
                  if sample in other[task] and same_question(record, other[task][sample])])
        for task, values in own.items() if task in other
    ]
    return [array for array in gaps if len(array)]


def _mean(records: list[Record], field: str) -> float | None:
    values = [record[field] for record in records if record.get(field) is not None]
    return float(np.mean(values)) if values else None
