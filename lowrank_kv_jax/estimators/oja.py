"""Oja's rule for a subspace (Oja, 1982; OjaKV, section 5.2 and Algorithm 1), in batch form."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.checks.bounds import check_kind, check_number
from lowrank_kv_jax.estimators.estimator import SizedEstimator, check_batch, register_estimator
from lowrank_kv_jax.estimators.gha import start_columns
from lowrank_kv_jax.estimators.linalg import divide_right, largest_eigenvalue, orthonormal_update, orthonormalise
from lowrank_kv_jax.estimators.svd import spectrum
from lowrank_kv_jax.storage.precise import matmul
from lowrank_kv_jax.storage.state import leaf, state

NORMALIZATIONS = ("median", "largest", "residual", "token", "none")
ANCHOR = 32.0
"""Tokens that a basis itself counts for, see `anchored_update`."""
COLUMNS_A_TOKEN = 4
"""From so many on a step may be orthonormalised in what its tokens span: a root of 2 T x 2 T, no factor of R x R."""
LEAST = 1e-5
"""Share of the stored energy below which a direction's is not told from rounding."""


def oja_update(
    basis: Float[jax.Array, "B J W R"], x: Float[jax.Array, "B T J W"], weight: Float[jax.Array, "B T"], eta: float,
    normalize: str, queries: Float[jax.Array, "B T N D"] | None = None,
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
        queries: `[B, T, N, D]`, tokens too, each in the channels of its kv head: C is that of [Q; X].

    Returns:
        Orthonormal basis, float32.
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize={normalize!r}: allowed are {', '.join(NORMALIZATIONS)}")
    u, by_token = basis.astype(jnp.float32), normalize == "token"
    step = pull(u, x, weight, by_token)
    if queries is not None:
        step = step + pull_of_queries(u, queries, weight, x.shape[2] * x.shape[3] // queries.shape[3], by_token)
    inner = matmul(u.mT, step)
    if normalize in ("residual", "token", "none"):
        step = step - matmul(u, inner)
    if normalize not in ("token", "none"):
        scale = _median(inner) if normalize == "median" else largest_eigenvalue(inner)
        step = step / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None, None]
    return where_fed(weight, orthonormalise(u + eta * step), u)


def anchored_update(
    basis: Float[jax.Array, "B J W R"], held: Float[jax.Array, "B J R R"], x: Float[jax.Array, "B T J W"],
    weight: Float[jax.Array, "B T"], eta: float, ordered: bool = True,
) -> Float32[jax.Array, "B J W R"]:
    """A step of Oja's rule of a running mean's length: towards the basis of all that is stored and of new tokens.

    What the basis stands for are stored coefficients c, second moment G = sum c c^T. A step that is divided by the energy
    stored along each direction, orth(U + eta C U G^-1), spans what orth(U G + eta C U) does: a step of orthogonal
    iteration for M = U G U^T + eta C. So no direction moves further than the new tokens weigh against what is stored
    along it, and steps shrink as 1 / n, as Oja (1982) asks of a stationary text. The columns stay close to what they
    were, so that components keep their sizes, and codes their steps. More than one iteration gains nothing: the next
    refresh goes on with it.

    `ANCHOR` tokens of the new ones' mean energy, spread evenly over the basis, stand for what it was fitted to: they
    decide where little is stored.

    Args:
        basis: orthonormal `[B, J, W, R]`.
        held: G, `[B, J, R, R]`.
        x: tokens `[B, T, J, W]`.
        weight: `[B, T]`, 0 leaves a token out. Rows without any token keep their basis.
        eta: weight of a new token against a stored one.
        ordered: keep nested spans, as Gram and Schmidt do: components that are coded in steps of their own keep their
            sizes better. Else columns of the same span, the nearest, may be taken: less work where tokens are few.

    Returns:
        Orthonormal basis, float32.
    """
    u, count = basis.astype(jnp.float32), jnp.sum(weight.astype(jnp.float32), axis=1)
    rows = x.astype(jnp.float32).swapaxes(1, 2)  # [B, J, T, W]
    coded, held = matmul(rows, u), held.astype(jnp.float32)
    weighted = coded * weight.astype(jnp.float32)[:, None, :, None]
    energy = jnp.sum(weighted * coded, axis=(-2, -1)) / jnp.maximum(count, 1.0)[:, None]
    least = ANCHOR * energy / u.shape[-1] + LEAST * jnp.trace(held, axis1=-2, axis2=-1)
    ridge = jnp.where(least > 0, least, 1.0)[..., None, None] * jnp.eye(u.shape[-1])
    taught = eta * divide_right(weighted, held + ridge)
    if not ordered and COLUMNS_A_TOKEN * x.shape[1] <= u.shape[-1]:
        return where_fed(weight, orthonormal_update(u, rows.mT, taught.mT), u)
    return where_fed(weight, orthonormalise(u + matmul(rows.mT, taught), passes=2), u)


def pull(u: jax.Array, x: jax.Array, weight: jax.Array, by_token: bool = False) -> jax.Array:
    """C U, float32 `[B, J, W, R]`, with C = sum_t w_t x_t x_t^T of tokens `[B, T, J, W]`.

    Args:
        by_token: each token's outer product divided by its ||x||^2.
    """
    x, weights = x.astype(jnp.float32).swapaxes(1, 2), weight.astype(jnp.float32)[:, None, :, None]
    if by_token:
        weights = weights / jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return matmul(x.mT, matmul(x, u) * weights)


def pull_of_queries(
    u: jax.Array, queries: jax.Array, weight: jax.Array, kv_heads: int, by_token: bool = False
) -> jax.Array:
    """`pull` of queries `[B, T, N, D]`, each in the channels of its kv head: C has a block for each head."""
    batch, tokens, heads, dim = queries.shape
    group, by_head = heads // kv_heads, u.reshape(batch, kv_heads, dim, u.shape[-1])
    rows = queries.reshape(batch, tokens, kv_heads, group, dim).swapaxes(2, 3).reshape(batch, -1, kv_heads, dim)
    return pull(by_head, rows, jnp.repeat(weight, group, axis=1), by_token).reshape(u.shape)


def where_fed(weight: jax.Array, moved: jax.Array, u: jax.Array) -> jax.Array:
    """Bases `[B, J, W, R]` that moved, of the rows that have any token."""
    fed = jnp.sum(weight, axis=1) > 0
    return jnp.where(fed[:, None, None, None], moved, u)


def _median(inner: jax.Array) -> jax.Array:
    """Median eigenvalue; a batch smaller than the rank has zero, and its own largest one bounds its step."""
    values = spectrum(inner)
    return jnp.maximum(jnp.median(values, axis=-1), values[..., -1] * 1e-3)


@state
class Subspace:
    """An orthonormal basis, float32 `[B, J, W, R]`."""

    basis: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="moments")


@register_estimator("oja")
@dataclasses.dataclass(frozen=True)
class Oja(SizedEstimator):
    """A basis moved by `oja_update`. W R numbers are kept; an update costs 2 T W R multiplications, an
    orthonormalisation of W x R and, where it is normalised by a spectrum, one of an R x R matrix: its largest eigenvalue
    by matrix products, its median by a decomposition (by products on an accelerator).

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
        check_kind("eta", self.eta, (float,))
        check_number("eta", self.eta, 0)
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
