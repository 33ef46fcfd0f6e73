"""The truncated SVD of a stream, updated batch by batch (Brand, 2002)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.estimators.estimator import (
    SizedEstimator,
    batch_moment,
    check_batch,
    register_estimator,
    start_moment,
)
from lowrank_kv_jax.estimators.frequent_directions import leading_rows
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.storage.precise import gram
from lowrank_kv_jax.storage.state import leaf, state


@state
class TruncatedSVD:
    """diag(s) V^T of the stream so far, float32 `[B, J, l, W]`, longest row first; on an accelerator a factor as good."""

    rows: jax.Array = leaf("batch", "kv_heads", None, "width", kind="moments")


@register_estimator("svd")
@dataclasses.dataclass(frozen=True)
class IncrementalSVD(SizedEstimator):
    """Keeps the `size` leading right singular vectors with their singular values.

    Exact for a single batch, and for a stream of rank `size`. What is cut off is gone: directions that come up slowly
    can be missed for ever, against which Frequent Directions shrinks. l W numbers are kept; an update of T tokens
    costs (l + T) W^2 multiplications and an eigendecomposition O(W^3), or on an accelerator orthogonal iteration.
    """

    keeps_energies: ClassVar[bool] = True

    def init(self, lead, width, start=None):
        if start is None:
            return TruncatedSVD(jnp.zeros((*lead, self.size, width), jnp.float32))
        moment = start_moment(jnp.broadcast_to(start, (*lead, *start.shape[-2:])))
        return TruncatedSVD(leading_rows(moment, self.size, shrink=False)[0])

    def update(self, learned, x, weight=None):
        x, weight = check_batch(x, weight)
        rows, _ = leading_rows(gram(learned.rows) + batch_moment(x, weight), self.size, shrink=False)
        return TruncatedSVD(rows)

    def basis(self, learned, rank):
        self.check_rank(rank, learned.rows.shape[-1])
        return principal_subspace(gram(learned.rows), rank)

    def forget(self, learned, factor):
        return TruncatedSVD(learned.rows * jnp.sqrt(jnp.asarray(factor, jnp.float32))[..., None, None])
