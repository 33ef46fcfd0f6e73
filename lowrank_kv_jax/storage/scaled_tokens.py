"""Tokens kept as directions that layers share, and a magnitude for each layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.state import leaf, state, static


@state
class ScaledTokens:
    """Those of one layer, widened block by block, or in registers; stands in the place of an array `[B, J, S, R]`.

    Attributes:
        direction: `[B, J, S, r]`.
        norm: magnitudes of all layers `[B, J, S, L]`: a slice would be copied at every step.
        rotary: rotary keys that stand before the directions, those of the layers side by side `[B, J, S, L * (R - r)]`;
            None: R = r.
        index: of the layer.
    """

    direction: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="coefficients")
    norm: jax.Array = leaf("batch", "kv_heads", "tokens", "layers", kind="scales")
    rotary: jax.Array | None = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    index: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        beside = 0 if self.rotary is None else self.rotary.shape[3] // self.norm.shape[3]
        return (*self.direction.shape[:3], beside + self.direction.shape[3])

    def read_block(self, start: jax.Array | int, size: int) -> Float[jax.Array, "B J {size} R"]:
        """Float32 tokens `start` to `start + size`."""
        direction, norm = (slice_block(x, start, size).astype(jnp.float32) for x in (self.direction, self.norm))
        scaled = direction * norm[..., self.index, None]
        if self.rotary is None:
            return scaled
        beside = slice_block(self.rotary, start, size).astype(jnp.float32)
        return jnp.concatenate([jnp.split(beside, norm.shape[-1], axis=-1)[self.index], scaled], axis=-1)
