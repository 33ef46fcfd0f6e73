"""The op that the core calls; XLA is the only backend so far."""

import jax

from lowrank_kv_jax.codecs.chunk_bases import ChunkBases
from lowrank_kv_jax.pallas_kernels.chunked_attention import reference
from lowrank_kv_jax.pallas_kernels.coefficient_attention import CachedTokens
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.rope import RopeSpec


def chunked_attention(
    q: jax.Array, tokens: CachedTokens, owner: jax.Array, k_bases: ChunkBases, v_bases: ChunkBases, *, page: int,
    rope: RopeSpec | None, kv_heads: int, scale: float, q_positions: jax.Array, window: int | None,
) -> AttnPartial:
    """One softmax over all chunks (Online Subspace Projection, section 6), in one pass.

    Args:
        q: queries after RoPE `[B, T, N, D]`; all tokens lie before them.
        tokens: coefficients, keys `[B, J, S, Rk]` and values `[B, J, S, Rv]`, S a multiple of `page`.
        owner: int `[B, S / page]`, the basis of each page of tokens.
        k_bases, v_bases: the bases.
        page: tokens that share a basis; a chunk is a run of pages.
        rope: rotation of keys that were coded before RoPE, rebuilt on read; None attends in coefficient space.
        kv_heads: K.
        scale, q_positions, window: as in `coefficient_attention`.

    Returns:
        Partial in head space: the exact softmax over the approximated logits, applied to the approximated values.
    """
    return reference.chunked_attention(
        q, tokens, owner, k_bases, v_bases, page=page, rope=rope, kv_heads=kv_heads, scale=scale,
        q_positions=q_positions, window=window,
    )
