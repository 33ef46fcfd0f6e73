"""Frequent Directions (Liberty, 2013; Ghashami et al., 2016), the sketch of Online Subspace Projection, section 5."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from lowrank_kv_jax.estimators.by_products import leading_factor
from lowrank_kv_jax.estimators.estimator import (
    SizedEstimator,
    batch_moment,
    check_batch,
    register_estimator,
    start_moment,
)
from lowrank_kv_jax.estimators.linalg import eigenvectors
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.storage.backend import platform
from lowrank_kv_jax.storage.precise import gram, matmul
from lowrank_kv_jax.storage.state import leaf, state


@state
class Sketch:
    """A sketch S of the stacked tokens A, those that a calibrated start stands for included.

    Attributes:
        rows: S, float32 `[B, J, l, W]`; orthogonal, longest first, on a CPU.
        shrunk: float32 `[B, J]`, the sum of what was subtracted from the squared singular values. It is the bound
            that is known without the tokens: 0 <= x^T (A^T A - S^T S) x <= shrunk for every unit x. On an accelerator
            each update may miss it by what `by_products.leading_factor` says.
    """

    rows: jax.Array = leaf("batch", "kv_heads", None, "width", kind="moments")
    shrunk: jax.Array = leaf("batch", "kv_heads", kind="moments")


@register_estimator("frequent_directions")
@dataclasses.dataclass(frozen=True)
class FrequentDirections(SizedEstimator):
    """A sketch of l = `size` rows with ||A^T A - S^T S|| <= ||A - A_r||_F^2 / (l + 1 - r) for every r <= l.

    An update stacks any number of rows under the sketch and shrinks once, by the squared singular value behind the l-th,
    the least that leaves l rows: the l leading directions and the next one lose as much, which is what the bound counts,
    and a sketch of as many rows as channels loses nothing. (Shrinking by the l-th, as the paper does, leaves a row of
    zeros and has l in the place of l + 1; shrinking only l rows by the middle one, as is often done, l / 2.) One batched
    update of T tokens costs l W^2 + T W^2 multiplications and an
    eigendecomposition O(W^3), whatever T, or on an accelerator orthogonal iteration: large batches are cheap, and shrink
    less often. l W numbers are kept.

    Attributes:
        size: l.
    """

    keeps_energies: ClassVar[bool] = True

    def init(self, lead, width, start=None):
        if start is None:
            return Sketch(jnp.zeros((*lead, self.size, width), jnp.float32), jnp.zeros(lead, jnp.float32))
        moment = start_moment(jnp.broadcast_to(start, (*lead, *start.shape[-2:])))
        rows, lost = leading_rows(moment, self.size, shrink=False)
        if start.shape[-1] > self.size:  # directions that have no row lose as much as the first of them
            _, lost = leading_rows(moment, self.size, shrink=True)
        return Sketch(rows, lost)

    def update(self, learned, x, weight=None):
        x, weight = check_batch(x, weight)
        rows, lost = leading_rows(gram(learned.rows) + batch_moment(x, weight), self.size, shrink=True)
        # nothing came: a second shrinking would only lose more
        fed = jnp.sum(weight, axis=-1) > 0
        return Sketch(
            jnp.where(fed[..., None, None], rows, learned.rows), learned.shrunk + jnp.where(fed, lost, 0.0)
        )

    def basis(self, learned, rank):
        self.check_rank(rank, learned.rows.shape[-1])
        return principal_subspace(gram(learned.rows), rank)

    def forget(self, learned, factor):
        factor = jnp.asarray(factor, jnp.float32)
        return Sketch(learned.rows * jnp.sqrt(factor)[..., None, None], learned.shrunk * factor)


def leading_rows(
    moment: Float32[jax.Array, "*lead W W"], size: int, *, shrink: bool
) -> tuple[Float32[jax.Array, "*lead {size} W"], Float32[jax.Array, "*lead"]]:
    """Rows `[..., size, W]` whose Gram matrix holds the leading directions of `moment`, and what was subtracted.

    Args:
        moment: symmetric positive semidefinite `[..., W, W]`.
        size: l; with more rows than W the rest is zero.
        shrink: subtract the eigenvalue behind the l-th from all of them; from W <= l, which are all kept, nothing.
    """
    width = moment.shape[-1]
    decompose = leading_factor if platform() != "cpu" else _decomposed
    rows, lost = decompose(moment, size, shrink=shrink)
    room = [(0, 0)] * (rows.ndim - 2) + [(0, max(size - width, 0)), (0, 0)]
    return jnp.pad(rows, room), lost


def _decomposed(moment: jax.Array, size: int, *, shrink: bool) -> tuple[jax.Array, jax.Array]:
    """At most W rows, by LAPACK."""
    vectors = eigenvectors(moment)[..., ::-1]
    values = jnp.sum(vectors * matmul(moment, vectors), axis=-2)
    values = jnp.maximum(values, 0.0)
    nothing = jnp.zeros(values.shape[:-1], jnp.float32)
    lost = values[..., size] if shrink and size < moment.shape[-1] else nothing
    kept = jnp.sqrt(jnp.maximum(values - lost[..., None], 0.0))[..., :size]
    return kept[..., None] * vectors[..., :size].mT, lost
