"""Means of a prompt's tokens, which are coded without them; attention adds them in closed form."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lowrank_kv_jax.storage.state import leaf, state


@state
class PromptMeans:
    """Of each row; stored beside the bases.

    Attributes:
        k, v: `[B, J, W]`, of keys as they are coded and of values.
    """

    k: jax.Array = leaf("batch", "kv_heads", "width", kind="bases")
    v: jax.Array = leaf("batch", "kv_heads", "width", kind="bases")

    def of_heads(self, kv_heads: int, begin: int = 0, end: int | None = None) -> tuple[jax.Array, jax.Array]:
        """Head by head, `[B, K, D]`, of the channels from `begin` to `end`: those of one layer of several."""
        return tuple(x[..., begin:end].reshape(len(x), kv_heads, -1) for x in (self.k, self.v))  # type: ignore[return-value]


def mean_of(x: Float[jax.Array, "B T J W"], weight: Float[jax.Array, "B T"], dtype) -> Float[jax.Array, "B J W"]:
    """The weighted mean in the dtype that it is stored in; 0 of a row without a token."""
    total = jnp.einsum("btjw,bt->bjw", x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    return (total / jnp.maximum(weight.sum(-1), 1e-9)[:, None, None]).astype(dtype)


def without(x: Float[jax.Array, "B T J W"], mean: Float[jax.Array, "B J W"] | None) -> Float[jax.Array, "B T J W"]:
    """Tokens without their mean, float32; as they are where there is none."""
    return x if mean is None else x.astype(jnp.float32) - mean.astype(jnp.float32)[:, None]
