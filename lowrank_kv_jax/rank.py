"""Ranks: an int is a number of columns, a float a fraction of the width of the basis."""

import numpy as np


def resolve_rank(field: str, value: int | float, width: int) -> int:
    """Number of basis columns.

    Args:
        field: name used in errors.
        value: an int in 1..width, or a float in (0, 1], rounded to the nearest rank of at least 1.
        width: channels that the basis spans.

    Raises:
        ValueError: outside of that; TypeError: neither int nor float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer):
        raise TypeError(f"{field}={value!r}: allowed is an int, or a float in (0, 1]")
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(f"{field}={value!r}: a fraction must lie in (0, 1] (an int counts columns)")
        return max(1, round(value * width))
    if not 1 <= value <= width:
        raise ValueError(f"{field}={value!r}: must lie in 1..{width}, the width of the basis")
    return int(value)


def rank_for_energy(eigenvalues: np.ndarray, energy: float) -> int:
    """Smallest rank whose leading eigenvalues hold `energy` of their sum, the maximum over leading axes.

    Args:
        eigenvalues: `[..., W]` of second-moment matrices, descending (squared singular values; OjaKV, A.2).
        energy: in (0, 1].
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy!r}: must lie in (0, 1]")
    share = np.cumsum(np.maximum(eigenvalues, 0), axis=-1)
    share = share / np.maximum(share[..., -1:], np.finfo(np.float64).tiny)
    return int(np.max(np.sum(share < energy * (1 - 1e-12), axis=-1) + 1).clip(1, eigenvalues.shape[-1]))
