"""What a cache method may know of a model: shapes, RoPE and windows, nothing of its weights."""

import dataclasses
from typing import NamedTuple

import jax

from lowrank_kv_jax.rope import RopeSpec


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static shape of a model's attention, hashable by value; handed to every method.

    Attributes:
        num_layers: L.
        q_heads: N, a multiple of `kv_heads`.
        kv_heads: K.
        head_dim: D.
        rope: the rotary embedding, `None` for models that have none.
        context: the longest sequence that the model was made for, in tokens.
        windows: sliding window of each layer in tokens (a query sees the last `window` keys, itself
            included), `None` where a layer sees everything.
    """

    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    context: int
    windows: tuple[int | None, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Softmax scale 1 / sqrt(head_dim); it stays so at any rank (OjaKV, A.3)."""
        return self.head_dim**-0.5


class Taps(NamedTuple):
    """What one attention layer exposes of `T` tokens to a cache method.

    Attributes:
        q: queries after RoPE, `[B, T, N, D]`.
        k: keys after RoPE, `[B, T, K, D]`.
        k_pre: what enters RoPE (after Qwen3's k-norm), `[B, T, K, D]`.
        v: values, `[B, T, K, D]`.
        x: the normalised hidden state that the projections read, `[B, T, H]`.
    """

    q: jax.Array
    k: jax.Array
    k_pre: jax.Array
    v: jax.Array
    x: jax.Array
