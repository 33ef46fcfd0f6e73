"""The piecewise-stationary Gaussian stream of StreamingKV, appendix A.6."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.estimators.gha import gha_update
from lowrank_kv_jax.estimators.linalg import orthonormalise

_update = jax.jit(gha_update, static_argnames=("eta", "iterations", "scale"))
_orthonormalise = jax.jit(orthonormalise)


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


class Followed(NamedTuple):
    """Normalised reconstruction error E_t of every decode batch `[segments * steps]`, for the paper's three baselines."""

    static: np.ndarray
    prefill_only: np.ndarray
    prefill_decode: np.ndarray


def follow_stream(
    segments: list[Segment], eta: float = 2e-3, iterations: int = 20, reset_every: int = 5, rank: int = 6
) -> Followed:
    """Figure 3a: one basis for ever, one re-estimated by GHA at every change point, one that goes on learning.

    Steps are sums over the 64 samples of a batch, as in Algorithm 1. The text gives no number of steps on the prefill.

    Args:
        eta: step size, of both phases.
        iterations: steps on the prefill of a segment.
        reset_every: decode steps after which the basis is orthonormalised.
        rank: r.
    """
    first = segments[0].prefill.astype(np.float64)
    static = jnp.asarray(np.linalg.svd(first, full_matrices=False)[2][:rank].T, jnp.float32)
    errors: dict[str, list[float]] = {name: [] for name in Followed._fields}
    fixed = moving = static
    for segment in segments:
        fixed, moving = (
            _orthonormalise(_update(basis, segment.prefill, None, eta, iterations=iterations, scale="sum"))
            for basis in (fixed, moving)
        )
        for step, batch in enumerate(segment.decode, 1):
            moving = _update(moving, batch, None, eta, iterations=1, scale="sum")
            moving = _orthonormalise(moving) if step % reset_every == 0 else moving
            for name, columns in zip(Followed._fields, (static, fixed, moving), strict=True):
                basis = np.asarray(columns)
                left = batch - batch @ basis @ basis.T
                errors[name].append(float(np.sum(left**2) / np.sum(batch**2)))
    return Followed(**{name: np.array(found) for name, found in errors.items()})
