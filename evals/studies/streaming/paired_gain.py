"""What a method gains over another on the same texts and needles, tested over samples and over tasks."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lowrank_kv_jax.evals.report.statistics import interval, rank_biserial, wilcoxon_p


@dataclasses.dataclass(frozen=True)
class Won:
    """Paired differences of one kind.

    Attributes:
        won, lost, of: how many are above zero, below it, and there are.
        p: two-sided, of Wilcoxon's signed-rank test; None for a single one.
        least: the smallest p that so many can reach, all of them won: 2 / 2^of. Above 0.05, with five or less, the
            test cannot decide anything.
        effect: rank-biserial correlation, +1 where all differences are won (table 8 of StreamingKV).
        low, high: 95% bootstrap interval of their mean, the differences drawn again; None for a single one, or where one
            is infinite.
    """

    won: int
    lost: int
    of: int
    p: float | None
    least: float
    effect: float
    low: float | None
    high: float | None

    @classmethod
    def count(cls, differences: np.ndarray, seed: int = 0) -> "Won":
        finite = np.isfinite(differences).all()
        drawn = interval([differences], seed) if finite else None
        return cls(int((differences > 0).sum()), int((differences < 0).sum()), len(differences),
                   wilcoxon_p(differences), 2.0 ** (1 - len(differences)), rank_biserial(differences),
                   drawn and drawn.low, drawn and drawn.high)


@dataclasses.dataclass(frozen=True)
class Gain:
    """Of one method over another.

    Attributes:
        why: what the two have in common.
        mean, median: over tasks and over samples, positive where `spec` is better; in the scores' unit.
        by_task: the means of the tasks, paired.
        by_sample: all samples of all tasks, paired. Those of a task are not independent of each other, so that a test
            over them tells of these texts, and one over tasks of others like them.
    """

    spec: str
    over: str
    why: str
    mean: float
    median: float
    by_task: Won
    by_sample: Won


def paired_gain(
    spec: str, over: str, why: str, scores: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]],
    seed: int = 0,
) -> Gain:
    """Compare scores by task, higher ones better, of the same samples in the same order.

    Args:
        seed: of the bootstrap.

    Raises:
        ValueError: the tasks or their numbers of samples differ.
    """
    if {task: len(own) for task, own in scores.items()} != {task: len(own) for task, own in others.items()}:
        raise ValueError(f"{spec} and {over} were not scored on the same samples")
    differences = [np.subtract(own, others[task]) for task, own in scores.items()]
    by_task = np.array([own.mean() for own in differences])
    pooled = np.concatenate(differences)
    return Gain(spec, over, why, float(by_task.mean()), float(np.median(pooled)), Won.count(by_task, seed),
                Won.count(pooled, seed))
