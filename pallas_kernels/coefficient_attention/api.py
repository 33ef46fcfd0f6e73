"""The attention ops that the core calls; the platform decides the backend."""

from typing import Any, NamedTuple

import jax

from lowrank_kv_jax.pallas_kernels.coefficient_attention import reference
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.rope import RopeSpec


class CachedTokens(NamedTuple):
    """Tokens of a segment, J key and J' value heads of possibly different width.

    Attributes:
        keys: `[B, J, S, Dk]`, keys after RoPE or their coefficients.
        values: `[B, J', S, Dv]`.
        lengths: int32 `[B]`, valid tokens of each row.
        positions: original positions of the tokens.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array
    positions: Any  # Runs, or another state whose `at(slots)` gives positions [B, S] or [B, J, S]


def coefficient_attention(
    q: jax.Array, tokens: CachedTokens, *, scale: float, q_positions: jax.Array, causal: bool, window: int | None
) -> AttnPartial:
    """Attention in the space in which the tokens are stored.

    Args:
        q: `[B, T, N, Dk]`, folded into the basis of the keys where there is one.
        tokens: the segment.
        scale: 1 / sqrt(head_dim), whatever the rank.
        q_positions: int32 `[B, T]`.
        causal: whether tokens of the segment may lie after a query (the block being appended).
        window: sliding window in tokens, or None.

    Returns:
        Partial whose out is in the space of the values, `[B, T, N, Dv]` (equations of section 3.2 of OjaKV).
    """
    return reference.coefficient_attention(
        q, tokens, scale=scale, q_positions=q_positions, causal=causal, window=window
    )


def rotary_coefficient_attention(
    q: jax.Array, tokens: CachedTokens, key_basis: jax.Array, *, rope: RopeSpec | None, kv_heads: int, scale: float,
    q_positions: jax.Array, causal: bool, window: int | None, value_basis: jax.Array | None = None,
) -> AttnPartial:
    """Attention over keys stored as coefficients: rebuilt, and rotated if they were taken before RoPE, block by block.

    Args:
        q: queries after RoPE `[B, T, N, D]`.
        tokens: `keys` holds coefficients `[B, J, S, R]`.
        key_basis: `[J, W, R]` or per row `[B, J, W, R]`, W = (kv_heads / J) * D.
        rope: rotation applied at the tokens' original positions; None leaves the rebuilt keys unrotated.
        kv_heads: K.
        scale, q_positions, causal, window: as in `coefficient_attention`.
        value_basis: rebuild the values too (the compute order of OjaKV's section 3.3); None attends in their space.

    Returns:
        Partial whose out is in the space of the values, or in head space with `value_basis`.
    """
    return reference.rotary_coefficient_attention(
        q, tokens, key_basis, rope=rope, kv_heads=kv_heads, scale=scale, q_positions=q_positions, causal=causal,
        window=window, value_basis=value_basis,
    )


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None
) -> jax.Array:
    """Exact causal attention of a prompt with itself (prefill).

    Args:
        q: `[B, T, N, D]`.
        k, v: `[B, T, K, D]`.
        scale: factor on the logits.
        window: sliding window in tokens, or None.

    Returns:
        `[B, T, N, D]` in the dtype of `q`. Rows are padded on the right, so no valid query sees a pad.
    """
    if jax.default_backend() == "cpu":
        return reference.causal_attention(q, k, v, scale=scale, window=window).astype(q.dtype)
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, local_window_size=local).astype(q.dtype)
