"""What a method gains over another on the same texts and needles, tested over samples and over tasks."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lowrank_kv_jax.evals.report.statistics import wilcoxon_p


@dataclasses.dataclass(frozen=True)
class Won:
    """Paired differences of one kind.

    Attributes:
        won, lost, of: how many are above zero, below it, and there are.
        p: two-sided, of Wilcoxon's signed-rank test; None for a single one.
        least: the smallest p that so many can reach, all of them won: 2 / 2^of. Above 0.05, with five or less, the
            test cannot decide anything.
    """

    won: int
    lost: int
    of: int
    p: float | None
    least: float

    @classmethod
    def count(cls, differences: np.ndarray) -> "Won":
        return cls(int((differences > 0).sum()), int((differences < 0).sum()), len(differences),
                   wilcoxon_p(differences), 2.0 ** (1 - len(differences)))


@dataclasses.dataclass(frozen=True)
class Gain:
    """Of one method over another.

    Attributes:
        why: what the two have in common.
        mean: over tasks, positive where `spec` is better; in the scores' unit.
        by_task: the means of the tasks, paired.
        by_sample: all samples of all tasks, paired. Those of a task are not independent of each other, so that a test
            over them tells of these texts, and one over tasks of others like them.
    """

    spec: str
    over: str
    why: str
    mean: float
    by_task: Won
    by_sample: Won


def paired_gain(
    spec: str, over: str, why: str, scores: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]
) -> Gain:
    """Compare scores by task, higher ones better, of the same samples in the same order.

    Raises:
        ValueError: the tasks or their numbers of samples differ.
    """
    if {task: len(own) for task, own in scores.items()} != {task: len(own) for task, own in others.items()}:
        raise ValueError(f"{spec} and {over} were not scored on the same samples")
    differences = [np.subtract(own, others[task]) for task, own in scores.items()]
    by_task = np.array([own.mean() for own in differences])
    return Gain(spec, over, why, float(by_task.mean()), Won.count(by_task), Won.count(np.concatenate(differences)))
