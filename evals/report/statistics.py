"""Paired comparison of two methods that answered the same samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES, CONFIDENCE = 2000, 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its bootstrap interval; the bounds are None where nothing can be drawn again."""

    mean: float
    low: float | None = None
    high: float | None = None


def interval(groups: Sequence[np.ndarray], seed: int = 0) -> Interval:
    """The mean over groups of their means, bootstrapped by drawing samples again within each group.

    Called with the differences of two methods on the same samples, the interval is the paired one.

    Args:
        groups: scores of the samples of each task.
    """
    mean = float(np.mean([group.mean() for group in groups]))
    if max(map(len, groups)) < 2:
        return Interval(mean)
    rng = np.random.default_rng(seed)
    means = [group[rng.integers(0, len(group), (RESAMPLES, len(group)))].mean(axis=1) for group in groups]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.mean(means, axis=0), [tail, 100 - tail])
    return Interval(mean, float(low), float(high))


def wilcoxon_p(differences: np.ndarray) -> float | None:
    """Two-sided p of the Wilcoxon signed-rank test; 1 without any difference, None for less than two
    samples."""
    from scipy.stats import wilcoxon

    if len(differences) < 2:
        return None
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0
    distinct = len(np.unique(np.abs(changed))) == len(changed)
    method = "exact" if distinct and len(changed) <= 20 else "asymptotic"
    result: Any = wilcoxon(changed, method=method, correction=method != "exact")
    return float(result.pvalue)
