"""RoPE in two turns, by where a tile of tokens begins and by a token's place in it; logits that positions alone decide.

Keys that are turned by their place in a tile meet queries that are turned back to where the tile begins:
q . R(t0 + i) k = (R(-t0) q) . (R(i) k). And what is the same before RoPE wherever it stands, m, adds q . R(t) m, a sum
over channel pairs of a cos(w t) + b sin(w t), whose weights follow from q and m: a few numbers a query in the place of a
key a token.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int, Int32

from lowrank_kv_jax.attention.rope import RopeSpec, rope_angles, rotate

TILE = 256
"""Tokens of a tile: the fewer, the less keys turn in it, and the more often queries are folded."""


def place_in_tile(positions: Int[jax.Array, "*any"], origin: int) -> Int32[jax.Array, "*any"]:
    """0 .. `TILE` - 1, of tiles that are counted from position `origin` on."""
    return (positions - origin) % TILE


def turning_weights(
    rope: RopeSpec, q: Float[jax.Array, "B T N D"], key: Float[jax.Array, "... K D"]
) -> Float32[jax.Array, "B T N A"]:
    """What `turning_columns` of a token are multiplied by, float32, for queries after RoPE.

    Args:
        key: before RoPE, of each kv head `[K, D]`, or of each row `[B, K, D]`.
    """
    half = rope.rotary_dim // 2
    key = jnp.repeat(key.astype(jnp.float32), q.shape[2] // key.shape[-2], axis=-2)
    key = key if key.ndim == 2 else key[:, None]
    q = q.astype(jnp.float32)
    (q1, q2, rest), (k1, k2, still) = (jnp.split(x, (half, 2 * half), axis=-1) for x in (q, key))
    parts = [q1 * k1 + q2 * k2, q2 * k1 - q1 * k2]
    return jnp.concatenate(parts + [(rest * still).sum(-1, keepdims=True)] * bool(rest.shape[-1]), axis=-1)


def turning_columns(
    cos: Float[jax.Array, "*lead H S"], sin: Float[jax.Array, "*lead H S"], weights: int
) -> Float[jax.Array, "*lead A S"]:
    """Columns of tokens at positions of these angles, as many as there are `weights`."""
    still = weights - 2 * cos.shape[-2]
    return jnp.concatenate([cos, sin, jnp.ones_like(cos[..., :still, :])], axis=-2)


def turning_logits(
    rope: RopeSpec, q: Float[jax.Array, "B T N D"], key: Float[jax.Array, "... K D"], begins: Int[jax.Array, "B n"]
) -> Float32[jax.Array, "B T N S"]:
    """What `turning_weights` and `turning_columns` add up to for the S = n * `TILE` tokens of tiles that begin at these
    positions: the weights are turned by them, and meet one table of places."""
    weights, angle = turning_weights(rope, q, key), np.arange(TILE) * rope.inverse_frequencies()[:, None]
    cos, sin = (x[:, None, None] for x in rope_angles(rope, begins))
    weights = jnp.broadcast_to(weights[:, :, :, None], (*q.shape[:3], begins.shape[1], weights.shape[-1]))
    table = turning_columns(*(jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle))), weights.shape[-1])
    found = jnp.matmul(rotate(weights, cos, -sin), table, precision=jax.lax.Precision.HIGH)  # no single bfloat16 pass
    return found.reshape(*q.shape[:3], -1)
