"""XLA implementations of the attention ops."""

import functools

import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import blockwise_attention, spread_heads
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.storage.block_reads import (
    BLOCK,
    block_for,
    block_slots,
    parts_are_tokens_last,
    slice_parts,
    visible_blocks,
    visible_slots,
)
from lowrank_kv_jax.storage.positions import PerHead


def _fits_one_block(tokens):
    """Whether the heads' tokens lie packed in one buffer that is no larger than a block of all heads' own buffers."""
    where = tokens.positions
    return isinstance(where, PerHead) and where.owner is not None and tokens.keys.shape[2] <= BLOCK * where.kv_heads


def coefficient_attention(q, tokens, *, scale, q_positions, causal, window, cap=None) -> AttnPartial:
    size = tokens.keys.shape[2]
    heads = max(tokens.keys.shape[1], tokens.values.shape[1])
    attend = functools.partial(
        blockwise_attention, q, shared_heads=heads, value_dim=tokens.values.shape[-1], scale=scale, cap=cap,
        tokens_last=parts_are_tokens_last(tokens.keys), values_last=parts_are_tokens_last(tokens.values),
    )
    if _fits_one_block(tokens):
        slots = jnp.arange(size)
        mask, _ = visible_slots(tokens, slots, True, q_positions, causal, window, q.shape[2])
        keys, values = (slice_parts(x, 0, size) for x in (tokens.keys, tokens.values))
        return attend(lambda i: (keys, values, mask), 0, 1)

    block = block_for(size, q.shape[1], q.shape[0] * q.shape[1] * q.shape[2])

    def read(i):
        start, slots, fresh = block_slots(i, size, block)
        mask, _ = visible_slots(tokens, slots, fresh, q_positions, causal, window, q.shape[2])
        keys, values = (
            tuple(spread_heads(part, heads) for part in slice_parts(x, start, block))
            for x in (tokens.keys, tokens.values)
        )
        return keys, values, mask

    return attend(read, *visible_blocks(tokens, q_positions, window, block))
