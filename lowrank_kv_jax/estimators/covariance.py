"""The exact running second moment."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.estimators.estimator import (
    Estimator,
    batch_moment,
    check_batch,
    register_estimator,
    start_moment,
)
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.storage.state import leaf, state


@state
class Covariance:
    """Sum of w x x^T, float32 `[B, J, W, W]`."""

    moment: jax.Array = leaf("batch", "kv_heads", "width", None, kind="moments")


@register_estimator("covariance")
@dataclasses.dataclass(frozen=True)
class CovarianceEstimator(Estimator):
    """Sums outer products: no approximation at all.

    Cost for each head: W^2 numbers; an update of T tokens takes T W^2 multiplications and no factorisation, a basis
    one eigendecomposition, O(W^3). At W = 64..128 that is the price of a sketch of 2r = W rows, which is why it is
    the measure of what sketching costs.
    """

    keeps_energies: ClassVar[bool] = True

    def init(self, lead, width, start=None):
        if start is None:
            return Covariance(jnp.zeros((*lead, width, width), jnp.float32))
        return Covariance(start_moment(jnp.broadcast_to(start, (*lead, *start.shape[-2:]))))

    def update(self, learned, x, weight=None):
        x, weight = check_batch(x, weight)
        return Covariance(learned.moment + batch_moment(x, weight))

    def basis(self, learned, rank):
        self.check_rank(rank, learned.moment.shape[-1])
        return principal_subspace(learned.moment, rank)

    def forget(self, learned, factor):
        return Covariance(learned.moment * jnp.asarray(factor, jnp.float32)[..., None, None])
