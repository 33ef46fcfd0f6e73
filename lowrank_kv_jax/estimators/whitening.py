"""Truncation of what a projection gives, whitened by its second moment (SVD-LLM, 2024; StreamingKV, appendix E)."""

import numpy as np
from jaxtyping import Float, Float64

JITTER = 1e-6
"""Share of the mean diagonal that is added to a moment. It moves no eigenvector."""
LARGEST_JITTER = 1e-2
"""Share beyond which a moment is no longer mended."""
DEAD = 1e-12
"""Eigenvalues below this share of the largest hold no energy: the tokens never went there."""


def whiten(moment: Float[np.ndarray, "W W"], what: str) -> Float64[np.ndarray, "W W"]:
    """S with S^T S = X^T X + lambda I, upper triangular float64 `[W, W]`.

    (The paper writes S S^T, but X S^-1 has orthonormal columns only in this order.) Lambda is `JITTER` of the mean
    diagonal; where rounding leaves the moment indefinite it is raised tenfold until the factorisation succeeds, up to
    `LARGEST_JITTER`.

    Args:
        moment: X^T X, symmetric `[W, W]`.
        what: named in errors.

    Raises:
        ValueError: the moment is not finite, zero, or indefinite beyond what lambda mends.
    """
    moment = np.asarray(moment, np.float64)
    scale = np.trace(moment) / len(moment)
    if not np.isfinite(moment).all() or not scale > 0:
        raise ValueError(f"calibration: the second moment of {what} is not finite and positive, its mean diagonal is "
                         f"{scale:.3g}")
    share = JITTER
    while share <= LARGEST_JITTER:
        try:
            return np.linalg.cholesky(moment + share * scale * np.eye(len(moment))).T
        except np.linalg.LinAlgError:
            share *= 10
    raise ValueError(f"calibration: the second moment of {what} is indefinite, its Cholesky factorisation fails even "
                     f"with {LARGEST_JITTER} of its mean diagonal added: calibrate in float32, with more or other text")


def truncate(moment: Float[np.ndarray, "W W"], rank: int, what: str) -> Float64[np.ndarray, "W R"]:
    """The decoder V of the rank-R factors of a projection that lose least of what it gives, y = x W.

    The paper truncates S W by its SVD, with S of `whiten` from the moment X^T X of what W reads. Calibration need not
    record that: W^T (X^T X) W is the moment of y, whose truncation with W = I has the same decoder and loss, and
    y V = x A (tested).

    Args:
        moment: Y^T Y `[W, W]`.
        rank: R.
        what: named in errors.

    Returns:
        Orthonormal columns, leading first.

    Raises:
        ValueError: as `whiten`, or fewer directions with any energy than a `rank` below the width.
    """
    factor = whiten(moment, what)
    values = np.linalg.eigvalsh(np.asarray(moment, np.float64))
    alive = int(np.sum(values > DEAD * values[-1]))
    if alive < rank < len(values):  # at full rank any completion is exact
        raise ValueError(f"calibration: {what} is singular, its tokens span {alive} of {len(values)} directions, below "
                         f"the rank {rank} asked for: calibrate on more text, or lower the rank")
    return np.linalg.svd(factor)[2][:rank].T
