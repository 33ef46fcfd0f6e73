"""XLA implementations of the attention ops."""

import jax.numpy as jnp

from lowrank_kv_jax.codecs.basis import reconstruct
from lowrank_kv_jax.pallas_kernels.blockwise import (
    BLOCK,
    block_range,
    block_slots,
    blockwise_attention,
    slice_block,
)
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.positions import PerHead
from lowrank_kv_jax.rope import rope_angles, rotate


def _visible(tokens, slots, fresh, q_positions, causal, window, q_heads):
    """Which of `slots` each query may see: bool that broadcasts to `[B, J, T, G, S]`; positions `[B, 1 or J, S]`."""
    positions = tokens.positions.at(slots)
    positions = positions[:, None] if positions.ndim == 2 else positions
    mask = (fresh & (slots[None] < tokens.lengths[:, None]))[:, None, None, None, :]
    key, query = positions[:, :, None, None], q_positions[:, None, :, None, None]
    if causal:
        mask = mask & (key <= query)
    if window is not None:
        mask = mask & (key > query - window)
    if isinstance(tokens.positions, PerHead) and tokens.positions.owner is not None:
        mask = mask & tokens.positions.owned(slots, q_heads)
    return mask, positions


def _spread(x, heads):
    """Repeat shared heads `[B, J, ...]` so that keys and values have `heads` of them."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def coefficient_attention(q, tokens, *, scale, q_positions, causal, window) -> AttnPartial:
    size = tokens.keys.shape[2]
    heads = max(tokens.keys.shape[1], tokens.values.shape[1])

    def read(i):
        start, slots, fresh = block_slots(i, size)
        mask, _ = _visible(tokens, slots, fresh, q_positions, causal, window, q.shape[2])
        return _spread(slice_block(tokens.keys, start), heads), _spread(slice_block(tokens.values, start), heads), mask

    first, last = block_range(size, tokens.lengths)
    return blockwise_attention(
        q, read, first, last, shared_heads=heads, value_dim=tokens.values.shape[-1], scale=scale
    )


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis
) -> AttnPartial:
    size = tokens.keys.shape[2]

    def read(i):
        start, slots, fresh = block_slots(i, size)
        mask, positions = _visible(tokens, slots, fresh, q_positions, causal, window, q.shape[2])
        keys = reconstruct(key_basis, slice_block(tokens.keys, start).astype(q.dtype), kv_heads)
        if rope is not None:
            cos, sin = rope_angles(rope, positions)
            keys = rotate(keys, cos, sin)
        values = slice_block(tokens.values, start)
        if value_basis is not None:
            values = reconstruct(value_basis, values.astype(q.dtype), kv_heads)
        return keys, _spread(values, kv_heads), mask

    value_dim = tokens.values.shape[-1] if value_basis is None else q.shape[-1]
    first, last = block_range(size, tokens.lengths)
    return blockwise_attention(q, read, first, last, shared_heads=kv_heads, value_dim=value_dim, scale=scale)


def causal_attention(q, k, v, *, scale, window):
    """Blocks of queries, each over the blocks of keys up to its own: half the work of the masked square."""
    batch, size, heads, dim = q.shape
    kv_heads = k.shape[2]
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    outs = []
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        queries = jnp.arange(begin, end)

        def read(i, queries=queries):
            start, slots, fresh = block_slots(i, size)
            mask = fresh[None, :] & (slots[None, :] <= queries[:, None])
            if window is not None:
                mask = mask & (slots[None, :] > queries[:, None] - window)
            mask = jnp.broadcast_to(mask[None], (batch, *mask.shape))
            return slice_block(keys, start), slice_block(values, start), mask

        lowest = 0 if window is None else max(begin - window + 1, 0) // BLOCK
        part = blockwise_attention(
            q[:, begin:end], read, lowest, (end + BLOCK - 1) // BLOCK, shared_heads=kv_heads, value_dim=dim, scale=scale
        )
        outs.append(part.out)
    return jnp.concatenate(outs, axis=1)
