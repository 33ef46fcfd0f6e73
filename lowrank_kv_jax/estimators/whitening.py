"""Truncation of a projection under the second moment of what it reads (SVD-LLM, 2024; StreamingKV, appendix E)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64

LARGEST_JITTER = 1e-2
"""Share of the mean diagonal beyond which a moment is no longer mended by jitter."""
DEAD = 1e-12
"""Eigenvalues below this share of the largest hold no energy: the tokens never went there."""


class Truncation(NamedTuple):
    """W ~ `encoder @ decoder.T`, float64.

    Attributes:
        encoder: A `[H, R]`.
        decoder: B^T `[W, R]`, orthonormal columns, leading first.
        singular_values: all of the whitened W, descending `[min(H, W)]`; the loss that a rank R predicts is the sum of
            the squares behind the first R (equation 26).
    """

    encoder: Float64[np.ndarray, "H R"]
    decoder: Float64[np.ndarray, "W R"]
    singular_values: Float64[np.ndarray, " min(H,W)"]

    @property
    def loss(self) -> float:
        """sum over tokens of ||x W - x A B||^2 that equation 26 predicts."""
        return float(np.sum(self.singular_values[self.decoder.shape[1] :] ** 2))


def whiten(moment: Float[np.ndarray, "H H"], jitter: float, what: str) -> Float64[np.ndarray, "H H"]:
    """S with S^T S = X^T X + lambda I, upper triangular float64 `[H, H]`.

    (The paper writes S S^T, but X S^-1 has orthonormal columns only in this order.)

    Args:
        moment: X^T X, symmetric `[H, H]`.
        jitter: lambda as a share of the mean diagonal; where rounding leaves the moment indefinite it is raised tenfold
            until the factorisation succeeds, up to `LARGEST_JITTER`.
        what: named in errors.

    Raises:
        ValueError: the moment is not finite, zero, or indefinite beyond what jitter mends.
    """
    moment = np.asarray(moment, np.float64)
    scale = np.trace(moment) / len(moment)
    if not np.isfinite(moment).all() or not scale > 0:
        raise ValueError(f"calibration: the second moment of {what} is not finite and positive, its mean diagonal is "
                         f"{scale:.3g}")
    share = jitter
    while True:
        try:
            return np.linalg.cholesky(moment + share * scale * np.eye(len(moment))).T
        except np.linalg.LinAlgError:
            share = max(10 * share, 1e-12)
        if share > LARGEST_JITTER:
            raise ValueError(
                f"calibration: the second moment of {what} is indefinite, its Cholesky factorisation fails even with "
                f"jitter={LARGEST_JITTER}: calibrate in float32, with more or other text")


def truncate(
    moment: Float[np.ndarray, "H H"], rank: int, weight: Float[np.ndarray, "H W"] | None = None, *,
    jitter: float = 1e-6, what: str = "the input",
) -> Truncation:
    """The rank-R factors of W that lose least of X W, by the SVD of S W with S from `whiten`.

    With W = I it is a PCA of X itself. That is why calibration need not record the hidden states: for y = x W the
    moment is W^T (X^T X) W, whose truncation with W = I has the same decoder V and loss, and y V = x A (tested).

    Args:
        moment: X^T X `[H, H]`.
        rank: R.
        weight: W `[H, W]`; None is the identity.
        jitter, what: see `whiten`.

    Raises:
        ValueError: as `whiten`, or fewer directions with any energy than a `rank` below the width.
    """
    factor = whiten(moment, jitter, what)
    own = np.asarray(moment if weight is None else weight.T @ moment @ weight, np.float64)
    values = np.linalg.eigvalsh(own)
    alive = int(np.sum(values > DEAD * values[-1]))
    if alive < rank < len(own):  # at full rank any completion is exact
        raise ValueError(f"calibration: {what} is singular, its tokens span {alive} of {len(own)} directions, below the "
                         f"rank {rank} asked for: calibrate on more text, or lower the rank")
    target = factor if weight is None else factor @ np.asarray(weight, np.float64)
    _, singular, right = np.linalg.svd(target, full_matrices=False)
    decoder = right[:rank].T
    return Truncation(decoder if weight is None else weight @ decoder, decoder, singular)
