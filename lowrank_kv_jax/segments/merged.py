"""Tokens of two layers kept as one shared direction and a magnitude for each layer."""

from typing import cast

import jax
import jax.numpy as jnp

from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.scaled_tokens import ScaledTokens
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
    """Keys (after RoPE, which turns both layers alike) and values of a pair of layers; of latent attention, latents.

    Attributes:
        k, v: directions `[B, K, S, D]`; of normed latents `[B, 1, S, r]`, which are values, too: `v` is None.
        k_norm, v_norm: magnitudes of the first and the second layer `[B, K, S, 2]`.
        rotary: rotary keys beside latents, not merged, those of the first layer before the second's
            `[B, 1, S, 2 rotary]`; None of other keys.
        length: int32 `[B]`, tokens held by each row.
        positions: where they stood.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="coefficients")
    v: jax.Array | None = leaf("batch", "kv_heads", "tokens", "head_dim", kind="coefficients")
    k_norm: jax.Array = leaf("batch", "kv_heads", "tokens", "layers", kind="scales")
    v_norm: jax.Array | None = leaf("batch", "kv_heads", "tokens", "layers", kind="scales")
    rotary: jax.Array | None = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Listed


def empty_merged(batch: int, kv_heads: int, size: int, head_dim: int, dtype, latent: int | None = None) -> Merged:
    """An empty segment of `size` slots; `latent` are the channels of each key that are its latent, if there is one."""
    def zeros(channels: int) -> jax.Array:
        return jnp.zeros((batch, kv_heads, size, channels), dtype)

    none, nowhere = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, size), jnp.int32)
    if latent is not None:
        return Merged(zeros(latent), None, zeros(2), None, zeros(2 * (head_dim - latent)), none, Listed(nowhere))
    return Merged(zeros(head_dim), zeros(head_dim), zeros(2), zeros(2), None, none, Listed(nowhere))


def layer_tokens(segment: Merged, index: int) -> CachedTokens:
    """One layer of the pair as the attention ops take it."""
    keys = ScaledTokens(segment.k, segment.k_norm, segment.rotary, index)
    values = keys if segment.v is None else ScaledTokens(segment.v, cast(jax.Array, segment.v_norm), None, index)
    return CachedTokens(cast(jax.Array, keys), cast(jax.Array, values), segment.length, segment.positions)


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
