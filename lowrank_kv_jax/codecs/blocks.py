"""Blocks of coded tokens, and which of them the queries of a step need (as Quest and ShadowKV choose pages).

Each block has a landmark, the mean of its keys after RoPE. Blocks of which the queries' softmax over all landmarks
makes most are read, the others are not.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.segments.merged import Listed
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.state import leaf, state


@state
class Landmarks:
    """Mean keys after RoPE of each block of one layer's tokens.

    Attributes:
        k: `[B, K, C, D]`, C blocks.
    """

    k: jax.Array = leaf("batch", "kv_heads", "chunks", "head_dim", kind="indices")


def landmarks(k: jax.Array, weight: jax.Array, size: int, blocks: int, dtype: Any) -> Landmarks:
    """Of keys `[B, S, K, D]`, the weight `[B, S]` of slots without a token 0, in `blocks` blocks of `size`."""
    room = blocks * size - k.shape[1]
    k, weight = (jnp.pad(x, ((0, 0), (0, room)) + ((0, 0),) * (x.ndim - 2)) for x in (k.astype(jnp.float32), weight))
    tokens = weight.reshape(len(k), blocks, size)
    total = jnp.einsum("bcs,bcskd->bkcd", tokens, k.reshape(len(k), blocks, size, *k.shape[2:]))
    return Landmarks((total / jnp.maximum(tokens.sum(-1), 1.0)[:, None, :, None]).astype(dtype))


def choose(marks: Landmarks, lengths: jax.Array, q: jax.Array, scale: float, size: int, count: int) -> jax.Array:
    """The `count` blocks that queries `[B, T, N, D]` need most, int32 `[B, count]`, ascending; one set for all heads."""
    kv_heads, blocks = marks.k.shape[1:3]
    q = q.astype(jnp.float32).reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])
    logits = jnp.einsum("btkgd,bkcd->btkgc", q, marks.k.astype(jnp.float32)) * scale
    there = (jnp.arange(blocks) * size < lengths[:, None])[:, None, None, None]
    share = jax.nn.softmax(jnp.where(there, logits, -1e30), axis=-1).sum((1, 2, 3))
    # blocks without a token come last, in this choice and in the order of the blocks
    _, best = jax.lax.top_k(jnp.where(there[:, 0, 0, 0], share, -1.0), count)
    return jnp.sort(best, axis=1)


def take(tokens: CachedTokens, chosen: jax.Array, size: int) -> CachedTokens:
    """The tokens of the blocks `chosen` `[B, C]` of a segment of whole blocks, as a short segment of its own."""
    starts = chosen * size
    slots = (starts[:, :, None] + jnp.arange(size)).reshape(len(chosen), -1)
    positions = jax.vmap(lambda p, s: _row(p).at(s)[0])(tokens.positions, slots)
    # only the last block of a row may hold fewer tokens than `size`: valid ones stay in front
    counts = jnp.clip(tokens.lengths[:, None] - starts, 0, size).sum(1)
    keys, values = (_gather(x, starts, size) for x in (tokens.keys, tokens.values))
    return CachedTokens(keys, values, counts, Listed(positions))


def _gather(stored: Any, starts: jax.Array, size: int) -> jax.Array:
    """Tokens `[B, J, C * size, R]` from `starts` `[B, C]`, widened where they are quantised."""

    def block(row: Any, start: jax.Array) -> jax.Array:
        if hasattr(row, "read_block"):
            return row.read_block(start, size)[0]
        return jax.lax.dynamic_slice_in_dim(row, start, size, axis=2)[0]

    blocks = jax.vmap(lambda row, begin: jax.vmap(lambda at: block(_row(row), at))(begin))(stored, starts)
    batch, count, heads, _, rank = blocks.shape
    return blocks.swapaxes(1, 2).reshape(batch, heads, count * size, rank)


def _row(stored: Any) -> Any:
    """One row of a batch, inside of a vmap, as a batch of one."""
    return jax.tree.map(lambda x: x[None], stored)
