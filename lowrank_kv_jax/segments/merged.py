"""Tokens of two layers kept as one shared direction and a magnitude for each layer."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.state import leaf, state


@state
class Listed:
    """Original positions of tokens that were picked here and there.

    Attributes:
        position: int32 `[B, S]`.
    """

    position: jax.Array = leaf("batch", "tokens", kind="indices")

    def at(self, slots: jax.Array) -> jax.Array:
        """Positions int32 `[B, S]` of `slots` `[S]`."""
        return jnp.take(self.position, slots, axis=1)


@state
class Merged:
    """Keys (after RoPE, which turns both layers alike) and values of a pair of layers.

    Attributes:
        k, v: directions `[B, K, S, D]`.
        k_norm, v_norm: magnitudes of the first and the second layer `[B, K, S, 2]`.
        length: int32 `[B]`, tokens held by each row.
        positions: where they stood.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="coefficients")
    v: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="coefficients")
    k_norm: jax.Array = leaf("batch", "kv_heads", "tokens", "layers", kind="scales")
    v_norm: jax.Array = leaf("batch", "kv_heads", "tokens", "layers", kind="scales")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Listed


class Scaled:
    """Directions of one layer, scaled block by block by its magnitudes; read by the attention ops."""

    def __init__(self, direction: jax.Array, norm: jax.Array):
        self.direction, self.norm = direction, norm
        self.shape = direction.shape

    def read_block(self, start: jax.Array | int, size: int) -> jax.Array:
        cut = (slice_block(x, start, size) for x in (self.direction, self.norm))
        direction, norm = (x.astype(jnp.float32) for x in cut)
        return direction * norm[..., None]


def empty_merged(batch: int, kv_heads: int, size: int, head_dim: int, dtype) -> Merged:
    """An empty segment of `size` slots."""
    buffer = jnp.zeros((batch, kv_heads, size, head_dim), dtype)
    norms = jnp.zeros((batch, kv_heads, size, 2), dtype)
    none, nowhere = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, size), jnp.int32)
    return Merged(buffer, jnp.zeros_like(buffer), norms, jnp.zeros_like(norms), none, Listed(nowhere))


def layer_tokens(segment: Merged, index: int) -> CachedTokens:
    """One layer of the pair as the attention ops take it."""
    keys, values = (
        Scaled(segment.k, segment.k_norm[..., index]),
        Scaled(segment.v, segment.v_norm[..., index]),
    )
    return CachedTokens(keys, values, segment.length, segment.positions)


def angle(x: jax.Array, y: jax.Array) -> jax.Array:
    """Angles in radians between vectors along the last axis; of a zero vector, a right one."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    cosine = jnp.sum(x * y, axis=-1) / jnp.where(lengths == 0, 1.0, lengths)
    return jnp.arccos(jnp.clip(cosine, -1.0, 1.0))


def slerp(x: jax.Array, y: jax.Array, t: float) -> jax.Array:
    """Spherical interpolation of the directions of `x` and `y`, unit vectors along the last axis.

    sin((1 - t) W) / sin W x / |x| + sin(t W) / sin W y / |y|, W the angle between them (Shoemake, 1985).
    Where the two (nearly) coincide or oppose each other, the straight line.
    """
    x, y = (_direction(z.astype(jnp.float32)) for z in (x, y))
    omega = angle(x, y)[..., None]
    sine = jnp.sin(omega)
    straight = sine < 1e-4
    sine = jnp.where(straight, 1.0, sine)
    first = jnp.where(straight, 1 - t, jnp.sin((1 - t) * omega) / sine)
    second = jnp.where(straight, t, jnp.sin(t * omega) / sine)
    return _direction(first * x + second * y)


def _direction(x: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(norm == 0, 1.0, norm)
