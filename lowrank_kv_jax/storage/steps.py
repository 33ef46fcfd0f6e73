"""Steps of water-filled coefficients: what the codes of a row count in, and what they are counted from.

A coefficient is zero + code * step. Both are the same for all tokens of a row, so that they fold into the basis that the
codes are read in, and into a mean.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.state import leaf, state


@state
class Steps:
    """Of keys or of values.

    Attributes:
        step: of each row's components `[B, J, R]`, above 0.
        zero: `[B, J, R]`.
    """

    step: jax.Array = leaf("batch", "kv_heads", "rank", kind="scales")
    zero: jax.Array = leaf("batch", "kv_heads", "rank", kind="scales")

    def count(self, coefficients: Float[jax.Array, "B J T R"]) -> Float[jax.Array, "B J T R"]:
        """Coefficients in units of their steps, as `WaterFilled` stores them."""
        step, zero = (x.astype(jnp.float32)[:, :, None] for x in (self.step, self.zero))
        return (coefficients.astype(jnp.float32) - zero) / step

    def widen(self, codes: Float[jax.Array, "B J T R"]) -> Float[jax.Array, "B J T R"]:
        """The coefficients of codes, float32."""
        step, zero = (x.astype(jnp.float32)[:, :, None] for x in (self.step, self.zero))
        return zero + codes.astype(jnp.float32) * step

    def moved(self, move: Float[jax.Array, "B J R R"], rows: Bool[jax.Array, " B"]) -> "Steps":
        """The steps of coefficients that were moved in these rows, c @ `move`: zeros move along, steps stay."""
        zero = narrow(precise.einsum("bjr,bjrp->bjp", self.zero.astype(move.dtype), move), self.zero.dtype)
        return dataclasses.replace(self, zero=jnp.where(rows[:, None, None], zero, self.zero))


def plain_steps(shape: tuple[int, int, int], dtype) -> Steps:
    """In which a code is its coefficient, for `[B, J, R]`: before anything was seen."""
    return Steps(jnp.ones(shape, dtype), jnp.zeros(shape, dtype))
