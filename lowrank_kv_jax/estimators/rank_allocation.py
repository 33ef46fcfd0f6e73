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
    weights = np.asarray(importance, np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("Fisher information: must be finite and at least 0, and not zero everywhere")
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


def _shares(weights: np.ndarray, units: int, cap: int) -> np.ndarray:
    """clip(c * weights, 1, cap) with the c at which they sum to `units`."""
    weights = np.maximum(weights, weights.max() * 1e-12)
    low, high = 0.0, cap / weights.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * weights, 1, cap).sum() < units else (low, middle)
    return np.clip(high * weights, 1, cap)
