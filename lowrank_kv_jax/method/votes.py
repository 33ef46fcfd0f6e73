"""Attention probabilities as votes: over a whole prompt block by block, and of the queries being decoded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.attention.sink_logits import probabilities
from lowrank_kv_jax.storage.block_reads import block_for, slice_block

# probabilities of valid queries (others are 0), how many tokens before it each of them sees -> votes
Vote = Callable[[Float32[jax.Array, "B J T G S"], Int[jax.Array, "B T"]], Float32[jax.Array, "B J S"]]

KEYS = 2048  # of a block that is widened
QUERIES = 64  # of a block: the probabilities of one block are all that lives at a time


def prompt_votes(
    q: Float[jax.Array, "B S N D"], k: Float[jax.Array, "B S K D"], lengths: Int[jax.Array, " B"], vote: Vote,
    last: int | None = None, *, scale: float, cap: float | None = None,
    sink_logits: Float[jax.Array, " N"] | None = None, sliding: int | None = None,
) -> Float32[jax.Array, "B K S"]:
    """Votes of a prompt's queries, causal softmax in float32.

    Args:
        q: `[B, S, N, D]` after RoPE; k: `[B, S, K, D]`.
        lengths: int32 `[B]`.
        vote: from probabilities to votes.
        last: only so many last queries of each row vote; None: all.
        scale, cap: as for `attention.blockwise.logits_of`.
        sink_logits: float32 `[N]`; they take their share of the attention.
        sliding: the layer's sliding window: a query sees so many last keys, itself included; None: all before it.

    Returns:
        float32 `[B, K, S]`.
    """
    batch, size, heads, dim = q.shape
    kv_heads = k.shape[2]
    blocks = -(-size // QUERIES)
    q = jnp.pad(q, ((0, 0), (0, blocks * QUERIES - size), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, QUERIES, kv_heads, heads // kv_heads, dim)
    begin = jnp.zeros_like(lengths) if last is None else lengths - last

    def block(i, total):
        index = i * QUERIES + jnp.arange(QUERIES)
        logits = jnp.einsum("btkgd,bskd->bktgs", q[:, i], k, preferred_element_type=jnp.float32)
        logits = logits_of(logits, scale, cap)
        causal = jnp.arange(size)[None] <= index[:, None]
        if sliding is not None:
            causal = causal & (jnp.arange(size)[None] > index[:, None] - sliding)
        p = probabilities(jnp.where(causal[:, None], logits, -jnp.inf), sink_logits, heads=(1, 3))
        voters = (index[None] < lengths[:, None]) & (index[None] >= begin[:, None])
        p = jnp.where(voters[:, None, :, None, None], p, 0.0)
        return total + vote(p, jnp.broadcast_to(seen_before(index, sliding), (batch, QUERIES)))

    return jax.lax.fori_loop(0, blocks, block, jnp.zeros((batch, kv_heads, size), jnp.float32))


def decoding_votes(
    q: Float[jax.Array, "B T N D"], keys: Any, lse: Float32[jax.Array, "B T N"], vote: Vote,
    before: Int[jax.Array, "B T"], seen: Bool[jax.Array, "_B _J _T _G S"], *, scale: float,
    cap: float | None = None,
) -> Float32[jax.Array, "B J S"]:
    """Votes of queries whose total log-sum-exp is known.

    Args:
        q: `[B, T, N, D]`; keys: `[B, J, S, D]`, an array or what is stored in its place.
        lse: float32 `[B, T, N]` over the whole cache, and sinks where the model has them.
        before: int32 `[B, T]`, see `seen_before`.
        seen: bool that broadcasts to `[B, J, T, G, S]`, G = N / J: who sees what; rows that are padding see nothing.

    Returns:
        float32 `[B, J, S]`.
    """
    batch, tokens, heads, dim = q.shape
    groups = keys.shape[1]
    per_head = heads // groups
    # the very product that blockwise_attention computes of a single block: compilers then take it once for both
    q = q.reshape(batch, tokens, groups, per_head, dim).swapaxes(1, 2).reshape(batch, groups, tokens * per_head, dim)
    logits = logits_of(_products(q, keys, tokens), scale, cap)
    logits = logits.reshape(batch, groups, tokens, per_head, -1)
    lse = lse.reshape(batch, tokens, groups, per_head).transpose(0, 2, 1, 3)[..., None]
    return vote(jnp.where(seen, jnp.exp(jnp.minimum(logits - lse, 0.0)), 0.0), before)


def seen_before(positions: Int[jax.Array, "*lead"], sliding: int | None) -> Int[jax.Array, "*lead"]:
    """How many tokens queries at `positions` see before themselves, through a sliding window or not."""
    return positions if sliding is None else jnp.minimum(positions, sliding - 1)


def _products(q: jax.Array, keys: jax.Array, queries: int) -> jax.Array:
    """float32 `[B, J, M, S]` of queries `[B, J, M, D]` and keys `[B, J, S, D]`, widened block by block.

    Args:
        queries: T; a few of them meet all keys at once on an accelerator, see `block_for`.
    """
    size, width = keys.shape[2], block_for(keys.shape[2], queries, q.shape[0] * q.shape[1] * q.shape[3], KEYS)

    def product(keys):
        return jnp.einsum("bjmd,bjsd->bjms", q, keys.astype(q.dtype), preferred_element_type=jnp.float32)

    if size <= width or (not hasattr(keys, "read_block") and keys.dtype == q.dtype):
        return product(slice_block(keys, 0, size))

    def block(i, out):
        start = jnp.minimum(i * width, size - width)
        return jax.lax.dynamic_update_slice_in_dim(out, product(slice_block(keys, start, width)), start, axis=3)

    empty = jnp.zeros((*q.shape[:3], size), jnp.float32)
    return jax.lax.fori_loop(0, -(-size // width), block, empty)


def total_attention(
    p: Float32[jax.Array, "B J T G S"], before: Int[jax.Array, "B T"]
) -> Float32[jax.Array, "B J S"]:
    """The sum of all probabilities (H2O)."""
    del before
    return p.sum((2, 3))


def above_average(
    p: Float32[jax.Array, "B J T G S"], before: Int[jax.Array, "B T"]
) -> Float32[jax.Array, "B J S"]:
    """How many queries gave more than the average of the tokens they saw, over their head's mean (Scissorhands)."""
    return (p.mean(3) > 1.0 / (before[:, None, :, None] + 1)).sum(2).astype(jnp.float32)
