"""Ranks: an int is a number of columns, a float a fraction of the width of the basis.

An int is taken as it is. Ranks that the library chooses (from a fraction, an energy, a size in bytes) are multiples of 8,
from a width of 128 on of 16 (but for a fraction that is a multiple of 8 as it stands), so that kernels load 16 bytes at
once and a TPU need not copy what it reads. Bases of fewer than 64 channels keep every rank: there a step of 8 would be a
step of an eighth and more.
"""

import math

import numpy as np
from jaxtyping import Float


def rank_multiple(width: int) -> int:
    """What the ranks that are chosen for a basis of so many channels are multiples of."""
    return 1 if width < 64 else 8 if width < 128 else 16


def check_rank(field: str, value: int | float) -> None:
    """What can be asked of a rank before the width is known; `field` is named in errors.

    Raises:
        ValueError: an int below 1, a float outside of (0, 1]; TypeError: neither int nor float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer):
        raise TypeError(f"{field}={value!r}: allowed is an int, or a float in (0, 1]")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"{field}={value!r}: a fraction must lie in (0, 1] (an int counts columns)")
    if value < 1 and not isinstance(value, float):
        raise ValueError(f"{field}={value!r}: must be at least 1 column, or a fraction in (0, 1]")


def resolve_rank(field: str, value: int | float, width: int) -> int:
    """Number of basis columns.

    Args:
        field: name used in errors.
        value: an int in 1..width, taken as it is, or a float in (0, 1]: the nearest multiple of `rank_multiple(width)`
            (half a multiple goes up), at least one and never above the width; 1.0 is the width. One that is a multiple
            of 8 as it stands is kept: an eighth of 192 channels is 24.
        width: channels that the basis spans.

    Raises:
        ValueError: outside of that; TypeError: neither int nor float.
    """
    check_rank(field, value)
    if isinstance(value, float):
        wanted, multiple = value * width, rank_multiple(width)
        if multiple > 8 and math.isclose(wanted, 8 * round(wanted / 8)):
            multiple = 8
        nearest = multiple * max(1, math.floor(wanted / multiple + 0.5))
        return width if value == 1 else min(nearest, width)
    if value > width:
        raise ValueError(f"{field}={value!r}: must lie in 1..{width}, the width of the basis")
    return int(value)


def rank_for_energy(eigenvalues: Float[np.ndarray, "... W"], energy: float) -> int:
    """Smallest rank whose leading eigenvalues hold `energy` of their sum, the maximum over leading axes, rounded up to
    a multiple of `rank_multiple(W)` within W.

    Args:
        eigenvalues: `[..., W]` of second-moment matrices, descending (squared singular values; OjaKV, A.2).
        energy: in (0, 1].
    """
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy!r}: must lie in (0, 1]")
    share = np.cumsum(np.maximum(eigenvalues, 0), axis=-1)
    share = share / np.maximum(share[..., -1:], np.finfo(np.float64).tiny)
    width = eigenvalues.shape[-1]
    multiple = rank_multiple(width)
    smallest = int(np.max(np.sum(share < energy * (1 - 1e-12), axis=-1) + 1))
    return min(-(-smallest // multiple) * multiple, width)
