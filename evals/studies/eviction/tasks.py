"""Scores of tasks by budget under either protocol, and how much of the gap to the full cache the moments close.

The paper's tables 1 to 4 and 7 observe the end of the prompt with the question in it: `query-aware`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowrank_kv_jax.evals.asking.few_at_a_time import few_at_a_time
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.longbench.run import evaluate_longbench
from lowrank_kv_jax.evals.ruler.run import evaluate_ruler
from lowrank_kv_jax.evals.studies.eviction.run import TOGETHER, Settings

PARTS = {
    "none": "mi=false,nc=false", "MI": "nc=false", "NC, order 0": "mi=false,order=0", "NC": "mi=false",
    "MI and NC, order 0": "order=0", "MI and NC": "", "MI and NC, Gaussian": "order=gaussian",
    "MI and NC, heads by attention": "heads_by=attention",
}
"""What of MomentKV is there, with the fields that say so; the approximation is of order 1 where none is named."""


class TaskScore(NamedTuple):
    """Of one method over all tasks.

    Attributes:
        spec: the method.
        part: a key of `PARTS`; a baseline's name.
        budget: tokens a kv head keeps; 0 of the full cache.
        score: mean over tasks, 0 to 100.
        by_task: scores.
        recovery: share of Ada-KV's gap to the full cache that is closed; None where there is no gap, and of those two.
        cache_bytes, full_cache_bytes: means over requests.
    """

    spec: str
    part: str
    budget: int
    score: float
    by_task: dict[str, float]
    recovery: float | None
    cache_bytes: float
    full_cache_bytes: float


def specs_of(budgets: Sequence[int]) -> dict[str, tuple[str, int]]:
    """Part and budget by spec, baselines first."""
    found = {"full": ("full", 0)}
    for budget in budgets:
        found |= {f"{name}:budget={budget}": (name, budget) for name in ("snapkv", "adakv")}
        for part, fields in PARTS.items():
            found["momentkv:" + ",".join(filter(None, (f"budget={budget}", fields)))] = part, budget
    return found


def task_table(
    model: Any, settings: Settings, tasks: Sequence[str], protocol: str, longbench: str | None = None,
    json: str | None = None, progress: bool = False,
) -> list[TaskScore]:
    """Every part of MomentKV beside SnapKV and Ada-KV at each budget.

    Args:
        tasks: of RULER at `settings.length`, or with `longbench` of LongBench's.
        protocol: "query-aware", the question is there when the prompt is compressed, or "query-agnostic".
        longbench: a folder of files in LongBench's format.
        json: see `evaluate`.

    Raises:
        ValueError, OSError: as `evaluate_ruler` and `evaluate_longbench`.
    """
    known, records = specs_of(settings.budgets), []
    for some in few_at_a_time(parse_methods(list(known)), TOGETHER):
        if longbench is None:
            records += evaluate_ruler(model, some, tasks, [settings.length], settings.samples, protocol, settings.seed,
                                      json=json, progress=progress)
        else:
            records += evaluate_longbench(model, some, tasks or None, settings.samples, protocol, data=longbench,
                                          max_length=settings.length, json=json, progress=progress, seed=settings.seed)
    return summed_up(records, known)


def summed_up(records: Sequence[dict[str, Any]], known: dict[str, tuple[str, int]]) -> list[TaskScore]:
    """The records of all samples, method by method."""
    by_task = {spec: {task: float(np.mean([r["score"] for r in records if (r["method"], r["task"]) == (spec, task)]))
                      for task in dict.fromkeys(r["task"] for r in records)} for spec in known}
    mean = {spec: float(np.mean(list(scores.values()))) for spec, scores in by_task.items()}
    rows = []
    for spec, (part, budget) in known.items():
        own, recovery = [r for r in records if r["method"] == spec], None
        if part in PARTS:
            base = mean[f"adakv:budget={budget}"]
            gap = mean["full"] - base
            recovery = 100 * (mean[spec] - base) / gap if gap > 0 else None
        rows.append(TaskScore(spec, part, budget, mean[spec], by_task[spec], recovery,
                              *(float(np.mean([r[name] for r in own])) for name in ("cache_bytes", "full_cache_bytes"))))
    return rows
