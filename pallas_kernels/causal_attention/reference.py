"""The op in XLA, and the truth in tests: a loop over blocks of queries, each over the blocks of keys up to its own."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import blockwise_attention
from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.storage.block_reads import BLOCK, block_slots, slice_block


def causal_attention(q, k, v, sink_logits, *, scale, window, cap=None):
    """Half the work of the masked square, and the logits of one pair of blocks at a time."""
    batch, size = q.shape[:2]
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)

    def attend(begin, width):
        """Outputs `[B, width, N, D]` of the queries from `begin` on."""
        queries = begin + jnp.arange(width)

        def read(i):
            start, slots, fresh = block_slots(i, size)
            mask = fresh[None, :] & (slots[None, :] <= queries[:, None])
            if window is not None:
                mask = mask & (slots[None, :] > queries[:, None] - window)
            mask = jnp.broadcast_to(mask[None], (batch, *mask.shape))
            return slice_block(keys, start), slice_block(values, start), mask

        first = 0 if window is None else jnp.maximum(begin - window + 1, 0) // BLOCK
        part = blockwise_attention(
            jax.lax.dynamic_slice_in_dim(q, begin, width, axis=1), read, first, (begin + width + BLOCK - 1) // BLOCK,
            shared_heads=k.shape[2], value_dim=v.shape[3], scale=scale, cap=cap,
        )
        return with_sink(part, sink_logits).out.astype(q.dtype)

    if size <= BLOCK:
        return attend(0, size)
    blocks, rest = divmod(size, BLOCK)

    def step(i, out):
        return jax.lax.dynamic_update_slice_in_dim(out, attend(i * BLOCK, BLOCK), i * BLOCK, axis=1)

    out = jax.lax.fori_loop(0, blocks, step, jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype))
    if rest:
        out = jax.lax.dynamic_update_slice_in_dim(out, attend(size - rest, rest), size - rest, axis=1)
    return out
