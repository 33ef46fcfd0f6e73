"""Second moments of a model's activations: all that calibration keeps of a corpus."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.rope import rope_angles, rotate
from lowrank_kv_jax.spec import AttentionSpec, Taps


class Moments(NamedTuple):
    """Sums of outer products over a corpus, per layer; W = K * D, the heads of a layer side by side.

    Attributes:
        tokens: number of tokens summed.
        k, k_pre, v: `[L, W, W]`, keys after and before RoPE, values.
        q, q_pre: `[L, K, D, D]`, all query heads of a kv head together.
    """

    tokens: np.ndarray | int
    k: np.ndarray
    k_pre: np.ndarray
    v: np.ndarray
    q: np.ndarray
    q_pre: np.ndarray

    def per_head(self, name: str, kv_heads: int) -> np.ndarray:
        """Diagonal blocks `[L, K, D, D]` of `k`, `k_pre` or `v`; `q` and `q_pre` as they are."""
        full = getattr(self, name)
        if full.ndim == 4:
            return full
        layers, width, _ = full.shape
        dim = width // kv_heads
        blocks = full.reshape(layers, kv_heads, dim, kv_heads, dim)
        return np.moveaxis(np.diagonal(blocks, axis1=1, axis2=3), -1, 1)


def layer_moments(spec: AttentionSpec, taps: Taps, positions: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
    """Sums of outer products of one layer over the valid tokens, float32.

    Args:
        taps: of T tokens, `[B, T, ...]`.
        positions: int32 `[B, T]`.
        valid: bool `[B, T]`.
    """
    q_pre = taps.q
    if spec.rope is not None:
        cos, sin = rope_angles(spec.rope, positions[:, :, None])
        q_pre = rotate(taps.q, cos, -sin)
    keep = valid[:, :, None].astype(jnp.float32)

    def joint(x):
        x = x.reshape(*x.shape[:2], -1).astype(jnp.float32) * keep
        x = x.reshape(-1, x.shape[-1])
        return jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)

    def queries(q):
        q = q.reshape(*q.shape[:2], spec.kv_heads, spec.group_size, spec.head_dim).astype(jnp.float32)
        q = (q * keep[..., None, None]).transpose(2, 0, 1, 3, 4).reshape(spec.kv_heads, -1, spec.head_dim)
        return jnp.matmul(q.swapaxes(1, 2), q, precision=jax.lax.Precision.HIGHEST)

    return {
        "k": joint(taps.k), "k_pre": joint(taps.k_pre), "v": joint(taps.v),
        "q": queries(taps.q), "q_pre": queries(q_pre),
    }
