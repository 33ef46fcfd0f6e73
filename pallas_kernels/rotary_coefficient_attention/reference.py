"""The op in XLA, and the truth in tests."""

from lowrank_kv_jax.codecs.basis import reconstruct
from lowrank_kv_jax.pallas_kernels.blockwise import (
    block_range,
    block_slots,
    blockwise_attention,
    slice_block,
    spread_heads,
    visible_slots,
)
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.rope import rope_angles, rotate


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis
) -> AttnPartial:
    size = tokens.keys.shape[2]

    def read(i):
        start, slots, fresh = block_slots(i, size)
        mask, positions = visible_slots(tokens, slots, fresh, q_positions, causal, window, q.shape[2])
        keys = reconstruct(key_basis, slice_block(tokens.keys, start).astype(q.dtype), kv_heads)
        if rope is not None:
            cos, sin = rope_angles(rope, positions)
            keys = rotate(keys, cos, sin)
        values = slice_block(tokens.values, start)
        if value_basis is not None:
            values = reconstruct(value_basis, values.astype(q.dtype), kv_heads)
        return keys, values if values.shape[1] == 1 else spread_heads(values, kv_heads), mask

    value_dim = tokens.values.shape[-1] if value_basis is None else q.shape[-1]
    first, last = block_range(size, tokens.lengths)
    return blockwise_attention(q, read, first, last, shared_heads=kv_heads, value_dim=value_dim, scale=scale)
