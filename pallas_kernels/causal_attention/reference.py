"""The op in XLA, and the truth in tests: a loop over blocks of queries, each over the blocks of keys up to its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import blockwise_attention
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.storage.block_reads import BLOCK, block_slots, slice_block


def causal_attention(q, k, v, sink_logits, *, scale, window, cap=None):
    """Half the work of the masked square, and the logits of one pair of blocks at a time."""
    attend = _of_queries(q, k, v, scale, window, cap)

    def answer(begin, width):
        return with_sink(attend(begin, width), sink_logits).out.astype(q.dtype)

    return _block_by_block(q.shape[1], answer)


def causal_partial(q, k, v, *, scale, window, cap=None) -> AttnPartial:
    """The same as a partial."""
    return AttnPartial(*_block_by_block(q.shape[1], _of_queries(q, k, v, scale, window, cap)))


def _of_queries(q, k, v, scale, window, cap) -> Callable[[Any, int], AttnPartial]:
    """From where queries begin, and how many they are, to their partial `[B, width, N, D]`."""
    batch, size = q.shape[:2]
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)

    def attend(begin, width):
        queries = begin + jnp.arange(width)

        def read(i):
            start, slots, fresh = block_slots(i, size)
            mask = fresh[None, :] & (slots[None, :] <= queries[:, None])
            if window is not None:
                mask = mask & (slots[None, :] > queries[:, None] - window)
            mask = jnp.broadcast_to(mask[None], (batch, *mask.shape))
            return slice_block(keys, start), slice_block(values, start), mask

        first = 0 if window is None else jnp.maximum(begin - window + 1, 0) // BLOCK
        return blockwise_attention(
            jax.lax.dynamic_slice_in_dim(q, begin, width, axis=1), read, first, (begin + width + BLOCK - 1) // BLOCK,
            shared_heads=k.shape[2], value_dim=v.shape[3], scale=scale, cap=cap,
        )

    return attend


def _block_by_block(size: int, attend: Callable[[Any, int], Any]) -> Any:
    """What `attend` gives of `size` queries, arrays `[B, T, ...]`."""
    if size <= BLOCK:
        return attend(0, size)
    blocks, rest = divmod(size, BLOCK)

    def put(out, begin, width):
        return jax.tree.map(
            lambda whole, x: jax.lax.dynamic_update_slice_in_dim(whole, x, begin, axis=1), out, attend(begin, width)
        )

    shapes = jax.eval_shape(lambda: attend(0, BLOCK))
    empty = jax.tree.map(lambda x: jnp.zeros((x.shape[0], size, *x.shape[2:]), x.dtype), shapes)
    out = jax.lax.fori_loop(0, blocks, lambda i, out: put(out, i * BLOCK, BLOCK), empty)
    return put(out, size - rest, rest) if rest else out
