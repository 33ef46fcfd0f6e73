"""The mean of a prompt's keys, which are coded without it; attention adds it in closed form.

Values keep theirs: many of the tokens that are attended to most have small ones, which a basis without a mean codes with
small errors.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import narrow


def mean_of(x: Float[jax.Array, "B T J W"], weight: Float[jax.Array, "B T"], dtype) -> Float[jax.Array, "B J W"]:
    """The weighted mean in the dtype that it is stored in; 0 of a row without a token."""
    total = precise.einsum("btjw,bt->bjw", x.astype(jnp.float32), weight)
    return narrow(total / jnp.maximum(weight.sum(-1), 1e-9)[:, None, None], dtype)


def without(x: Float[jax.Array, "B T J W"], mean: Float[jax.Array, "B J W"] | None) -> Float[jax.Array, "B T J W"]:
    """Tokens without their mean, float32; as they are where there is none."""
    return x if mean is None else x.astype(jnp.float32) - mean.astype(jnp.float32)[:, None]


def of_heads(
    mean: Float[jax.Array, "B J W"] | None, kv_heads: int, begin: int | jax.Array = 0, width: int | None = None
) -> Float[jax.Array, "B K D"] | None:
    """Head by head; of so many channels from `begin` on, those of one layer of several."""
    if mean is not None and width is not None:
        mean = jax.lax.dynamic_slice_in_dim(mean, begin, width, axis=-1)
    return None if mean is None else mean.reshape(len(mean), kv_heads, -1)
