"""The piecewise-stationary Gaussian stream of StreamingKV, appendix A.6."""

from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """Samples of one segment: prefill `[n, d]`, decode `[steps, n, d]`, and their covariance `[d, d]`."""

    prefill: np.ndarray
    decode: np.ndarray
    covariance: np.ndarray


def piecewise_stream(
    segments: int = 4, steps: int = 20, batch: int = 64, width: int = 40, rank: int = 6,
    leading: tuple[float, float] = (6.0, 3.0), seed: int = 0,
) -> list[Segment]:
    """Segments whose covariances are independent random rotations of one decaying spectrum.

    Args:
        segments: number of stationary pieces; a change point lies between two.
        steps: decode batches of a segment.
        batch: samples of a batch, and of the prefill.
        width, rank: d and the rank of the dominant subspace.
        leading: first and last of its eigenvalues, evenly spaced; the others are 1.
        seed: of everything random.
    """
    rng = np.random.default_rng(seed)
    values = np.concatenate([np.linspace(*leading, rank), np.ones(width - rank)])
    out = []
    for _ in range(segments):
        rotation = np.linalg.qr(rng.normal(size=(width, width)))[0]
        root = rotation * np.sqrt(values)
        samples = rng.normal(size=(steps + 1, batch, width)) @ root.T
        out.append(Segment(samples[0], samples[1:], rotation @ np.diag(values) @ rotation.T))
    return out


def segment_error(basis: np.ndarray, segment: Segment) -> float:
    """Share of a segment's expected energy that a basis `[d, r]` leaves, relative to the best of its rank: the excess.

    0 for the segment's own principal subspace.
    """
    values = np.linalg.eigvalsh(segment.covariance)[::-1]
    held = np.trace(np.asarray(basis, np.float64).T @ segment.covariance @ np.asarray(basis, np.float64))
    return float((values[: basis.shape[-1]].sum() - held) / values.sum())
