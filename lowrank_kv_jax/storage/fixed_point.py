"""Numbers in 16 bits with an exponent for each row: a step that all numbers of the row share.

What is added to a number in small portions is lost where a portion is less than half a step. A step of a 16-bit float is
2^-7 or 2^-10 of the number; here it is 2^-14 of the row's largest at the most.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from lowrank_kv_jax.storage.state import leaf, state


@state
class FixedPoint:
    """Stands in the place of an array `[B, K, M, N]` of moments: x ~ codes * 2^exponents.

    Attributes:
        codes: int16 `[B, K, M, N]`.
        exponents: int8 `[B, K, M, 1]`, the least with which all of a row has codes.
    """

    codes: jax.Array = leaf("batch", "kv_heads", "head_dim", None, kind="moments")
    exponents: jax.Array = leaf("batch", "kv_heads", "head_dim", None, kind="moments")

    def widened(self) -> Float32[jax.Array, "B K M N"]:
        """The numbers."""
        return jnp.ldexp(self.codes.astype(jnp.float32), self.exponents.astype(jnp.int32))


def fixed_point(x: Float[jax.Array, "B K M N"]) -> FixedPoint:
    """Numbers rounded to the nearest code; a row of zeros stays so."""
    x = x.astype(jnp.float32)
    _, exponents = jnp.frexp(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    exponents = jnp.clip(exponents - 15, -126, 112)
    codes = jnp.clip(jnp.round(jnp.ldexp(x, -exponents)), -(2**15), 2**15 - 1)
    return FixedPoint(codes.astype(jnp.int16), exponents.astype(jnp.int8))
