"""Oja's rule for a subspace (Oja, 1982; OjaKV, section 5.2 and Algorithm 1), in batch form."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.estimators.estimator import SizedEstimator, check_batch, register_estimator
from lowrank_kv_jax.estimators.gha import start_columns
from lowrank_kv_jax.estimators.linalg import eigenvalues, largest_eigenvalue, orthonormalise
from lowrank_kv_jax.storage.state import leaf, state

NORMALIZATIONS = ("median", "largest", "residual", "token", "none")


def oja_update(
    basis: Float[jax.Array, "B J W R"], x: Float[jax.Array, "B T J W"], weight: Float[jax.Array, "B T"], eta: float,
    normalize: str,
) -> Float32[jax.Array, "B J W R"]:
    """One batch step of Oja's rule from the basis U towards the principal subspace of C = sum_t w_t x_t x_t^T.

    The paper prints U <- orth(U + eta (X - U Y) Y^T) with Y = U^T X, that is U + eta (I - U U^T) C U. With raw
    activations that step is far too long: once eta ||C|| >> 1 the residual term outweighs U, and the orthonormalised
    basis spans the *complement* of the principal subspace. Since the basis is orthonormalised anyway, the subtraction
    (Oja's decay of the norm) is not needed, and without it the step is stable at any length:

    * "median": orth(U + eta C U / median(eig(U^T C U))). Half of the directions are led by the new tokens, half by the
      old basis.
    * "largest": the same with the largest eigenvalue: a short step for small batches.
    * "residual": the printed rule divided by the largest eigenvalue of Y Y^T.
    * "token": the printed rule with each token's outer product divided by its ||x||^2.
    * "none": the printed rule.

    Args:
        basis: orthonormal `[B, J, W, R]`.
        x: tokens `[B, T, J, W]`.
        weight: `[B, T]`, 0 leaves a token out. Rows without any token keep their basis.
        eta: step size.
        normalize: one of `NORMALIZATIONS`.

    Returns:
        Orthonormal basis, float32.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize={normalize!r}: allowed are {', '.join(NORMALIZATIONS)}")
    u = basis.astype(jnp.float32)
    x = x.astype(jnp.float32).swapaxes(1, 2)
    weights = weight.astype(jnp.float32)[:, None, :, None]
    if normalize == "token":
        weights = weights / jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    y = _mm(x, u)
    weighted = y * weights
    step = _mm(x.mT, weighted)
    inner = _mm(y.mT, weighted)
    if normalize in ("residual", "token", "none"):
        step = step - _mm(u, inner)
    if normalize not in ("token", "none"):
        scale = _median(inner) if normalize == "median" else largest_eigenvalue(inner)
        step = step / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None, None]
    moved = orthonormalise(u + eta * step)
    fed = jnp.sum(weight, axis=1) > 0
    return jnp.where(fed[:, None, None, None], moved, u)


def _median(inner: jax.Array) -> jax.Array:
    """Median eigenvalue; a batch smaller than the rank has zero, and its own largest one bounds its step."""
    spectrum = eigenvalues(inner)
    return jnp.maximum(jnp.median(spectrum, axis=-1), spectrum[..., -1] * 1e-3)


def _mm(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


@state
class Subspace:
    """An orthonormal basis, float32 `[B, J, W, R]`."""

    basis: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="moments")


@register_estimator("oja")
@dataclasses.dataclass(frozen=True)
class Oja(SizedEstimator):
    """A basis moved by `oja_update`. W R numbers are kept; an update costs 2 T W R multiplications, an
    orthonormalisation of W x R and, where it is normalised by a spectrum, one of an R x R matrix: its largest eigenvalue
    by matrix products, its median by a decomposition.

    A step with a positive multiple of the identity is an orthogonal iteration, whose leading columns do not depend on
    those after them: a basis of lower rank is the leading columns. ("residual", "token" and "none" move the subspace
    as a whole; their columns have no order.)

    Attributes:
        size: R, columns.
        eta, normalize: see `oja_update`.
    """

    eta: float = 1.0
    normalize: str = "median"

    def __post_init__(self):
        super().__post_init__()
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize={self.normalize!r}: allowed are {', '.join(NORMALIZATIONS)}")

    def init(self, lead, width, start=None):
        return Subspace(start_columns(lead, width, self.size, start))

    def update(self, learned, x, weight=None):
        x, weight = check_batch(x, weight)
        lead = x.shape[:-2]
        flat = learned.basis.reshape(-1, 1, *learned.basis.shape[-2:])
        x, weight = x.reshape(len(flat), x.shape[-2], 1, -1), weight.reshape(len(flat), -1)
        moved = oja_update(flat, x, weight, self.eta, self.normalize)
        return Subspace(moved.reshape(*lead, *moved.shape[-2:]))

    def basis(self, learned, rank):
        self.check_rank(rank, learned.basis.shape[-2])
        return learned.basis[..., :rank]
