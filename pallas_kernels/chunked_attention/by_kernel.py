"""Chunks on an accelerator: the kernel of `coefficient_attention`, each chunk a row of its batch."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import visible_range
from lowrank_kv_jax.storage.basis import expand_values, fold_query


def chunked_attention(
    kernel, q, tokens, owner, k_bases, v_bases, *, page, rope, kv_heads, scale, q_positions, window, interpret
) -> AttnPartial:
    """A chunk's queries are folded into its basis; its partial is expanded and merged with the others in head space."""
    if rope is not None:
        raise Unsupported("chunks that were coded before RoPE")
    begin, end = visible_range(tokens, q_positions, False, window)
    first, after = chunk_slots(owner, tokens.lengths, page, k_bases.capacity)
    batch, chunks = first.shape
    begin = jnp.maximum(begin[:, None], first[..., None])
    end = jnp.minimum(end[:, None], after[..., None])

    def rows(x):
        return x.reshape(batch * chunks, *x.shape[2:])

    queries = rows(jnp.broadcast_to(q[:, None], (batch, chunks, *q.shape[1:])))
    folded = fold_query(rows(k_bases.part(0, chunks, q.dtype)), queries, kv_heads)
    size = tokens.keys.shape[2]  # a chunk may be as long as all of them: a basis can be reused
    out, lse = kernel.attend_slots(folded, tokens, rows(begin), rows(end), scale=scale, size=size, interpret=interpret)
    out = expand_values(rows(v_bases.part(0, chunks, out.dtype)), out, kv_heads)
    out, lse = (x.reshape(batch, chunks, *x.shape[1:]) for x in (out, lse))
    return merge([AttnPartial(out[:, i], lse[:, i]) for i in range(chunks)])


def chunk_slots(owner: jax.Array, lengths: jax.Array, page: int, chunks: int) -> tuple[jax.Array, jax.Array]:
    """First slot of each chunk and the slot behind it, int32 `[B, C]`, from the bases of the pages `[B, P]`."""
    held = (jnp.arange(owner.shape[1]) * page < lengths[:, None])[:, None]
    number = jnp.arange(chunks)[:, None]
    first, after = (
        page * jnp.sum(held & (owner[:, None] < last), axis=2, dtype=jnp.int32) for last in (number, number + 1)
    )
    return first, after
