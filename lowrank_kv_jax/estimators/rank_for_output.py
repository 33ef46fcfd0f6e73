"""Ranks that a budget for the error of each layer's output allows, as the code of EigenAttention chooses them."""

from typing import NamedTuple

import numpy as np

from lowrank_kv_jax.estimators.rank import rank_multiple

THRESHOLDS = 1 - 0.02 * np.arange(50)
"""Shares of the sum of singular values that are tried one after the other."""
LEAST = 0.45
"""Of the width of a head: no threshold is tried behind one that leaves keys or values so few columns."""


class OutputErrors(NamedTuple):
    """What each of `THRESHOLDS` does to a layer's output, in bases of keys alone.

    Attributes:
        error: relative, `[L, 50]`; inf where it was not tried.
    """

    error: np.ndarray


def threshold_ranks(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Ranks of keys and of values at each threshold, int `[50, 2]`.

    As many leading singular values as hold less than the threshold of their sum (not of their squares), the most of any
    head, rounded up to what kernels load at once.

    Args:
        k, v: eigenvalues of second moments, descending: `[D]` of all heads' keys together, `[K, D]` of values.
    """
    width, found = k.shape[-1], []
    for values in (k, v):
        singular = np.sqrt(np.maximum(values, 0))
        share = np.cumsum(singular, axis=-1) / np.maximum(singular.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
        held = (share < THRESHOLDS.reshape(-1, *(1,) * share.ndim) - 1e-12).sum(-1)
        found.append(held.reshape(len(THRESHOLDS), -1).max(1))
    ranks = np.stack(found, axis=1)
    ranks[0], multiple = width, rank_multiple(width)
    return np.clip(-(-ranks // multiple) * multiple, 1, width)


def tried(ranks: np.ndarray) -> int:
    """How many thresholds are tried: up to the first whose ranks `[50, 2]` of keys or values are few enough to stop."""
    width = ranks[0, 0]
    few = (ranks <= LEAST * width).any(1)
    return int(np.argmax(few)) + 1 if few.any() else len(ranks)


def ranks_for_output(k: np.ndarray, v: np.ndarray, error: np.ndarray, budget: float) -> tuple[int, int]:
    """Ranks of a layer at the last threshold before the one that is the first to reach the budget, or to be the last.

    Args:
        k, v: as of `threshold_ranks`.
        error: of each threshold, `[50]`.
    """
    ranks = threshold_ranks(k, v)
    last = tried(ranks) - 1
    over = error[: last + 1] >= budget
    stop = int(np.argmax(over)) if over.any() else last
    rank_k, rank_v = ranks[max(stop - 1, 0)]
    return int(rank_k), int(rank_v)
