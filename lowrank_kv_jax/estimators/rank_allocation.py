"""Ranks in proportion to importance, in whole multiples, of an exact total (Palu; StreamingKV, section 4.1)."""

import numpy as np
from jaxtyping import Int, Real


def allocate_ranks(
    importance: Real[np.ndarray, "*matrices"], total: int, multiple: int, most: int
) -> Int[np.ndarray, "*matrices"]:
    """Ranks of the shape of `importance`, each a multiple of `multiple` in multiple..most, that sum to `total`.

    Shares that the limits cut off go to the others, and what rounding down leaves to the largest remainders.

    Args:
        importance: at least 0, finite, not all zero (the Fisher information of each matrix).
        total: budget; a multiple of `multiple`.
        multiple: of every rank.
        most: largest rank, a multiple of `multiple`.

    Raises:
        ValueError: an importance or a total that cannot be met.
    """
    weights = _weights(importance)
    if multiple < 1 or most % multiple:
        raise ValueError(f"rank_multiple={multiple}: must divide the width of the bases, {most}")
    low, high = weights.size * multiple, weights.size * most
    if total % multiple or not low <= total <= high:
        raise ValueError(f"a total rank of {total} over {weights.size} matrices in multiples of {multiple}: must be one "
                         f"in {low}..{high}; choose rank so that rank * {weights.size} is")
    units, cap = total // multiple, most // multiple
    shares = _shares(weights.ravel(), units, cap)
    ranks = np.maximum(np.floor(shares + 1e-9), 1).astype(int)
    for index in np.argsort(ranks - shares, kind="stable"):  # the largest remainders first
        if ranks.sum() == units:
            break
        ranks[index] += ranks[index] < cap
    return (ranks * multiple).reshape(weights.shape)


def nearest_ranks(
    importance: Real[np.ndarray, "*matrices"], total: int, multiple: int, most: int, groups: int = 1
) -> Int[np.ndarray, "*matrices"]:
    """Ranks of each group of heads as Palu's code allots them (`rank_search.py`, `fisher_uniform`).

    Shares of whole matrices are rounded down and cut off at the width, what is missing is handed out one by one, the
    smallest remainders first, and each group's part is rounded to the nearest multiple, one at the least. So their sum is
    `total` only about.

    Args:
        importance: as of `allocate_ranks`.
        total: of all matrices, over all of their groups.
        multiple: of every rank, and at most `most`.
        most: largest rank of a group: its width.
        groups: of heads in a matrix, which share its rank evenly.

    Raises:
        ValueError: an importance or a total that cannot be met.
    """
    weights = _weights(importance)
    if not 0 < total <= weights.size * groups * most:
        raise ValueError(f"a total rank of {total} over {weights.size} matrices of {groups * most} columns: must lie in "
                         f"1..{weights.size * groups * most}")
    shares = total * weights.ravel() / weights.sum()
    ranks = np.minimum(np.floor(shares), groups * most).astype(int)
    order = np.argsort(shares - ranks, kind="stable")
    while (left := total - int(ranks.sum())) > 0:
        ranks[order[ranks[order] < groups * most][:left]] += 1
    each = np.maximum(np.round(ranks // groups / multiple), 1).astype(int) * multiple
    return np.minimum(each, most).reshape(weights.shape)


def _weights(importance: np.ndarray) -> np.ndarray:
    weights = np.asarray(importance, np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("Fisher information: must be finite and at least 0, and not zero everywhere")
    return weights


def _shares(weights: np.ndarray, units: int, cap: int) -> np.ndarray:
    """clip(c * weights, 1, cap) with the c at which they sum to `units`."""
    weights = np.maximum(weights, weights.max() * 1e-12)
    low, high = 0.0, cap / weights.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * weights, 1, cap).sum() < units else (low, middle)
    return np.clip(high * weights, 1, cap)
