"""Coefficients in chunks, each with bases of its own: partials within a chunk, merged in head space."""

import functools

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.basis import expand_values, fold_query
from lowrank_kv_jax.pallas_kernels.coefficient_attention import reference
from lowrank_kv_jax.pallas_kernels.packing import visible_range
from lowrank_kv_jax.partial import AttnPartial, empty_partial, merge


def by_kernel(
    kernel, q, tokens, first, key_bases, value_bases, *, kv_heads, scale, q_positions, causal, window, most,
    interpret=False,
) -> AttnPartial:
    """A kernel reads each chunk as a row of its own, whose queries are folded into its basis."""
    begin, end = _chunk_ranges(tokens, first, *visible_range(tokens, q_positions, causal, window))
    batch, chunks = first.shape
    rows = (batch * chunks,)

    def flat(x):
        return x.reshape(rows + x.shape[2:])

    queries = flat(jnp.broadcast_to(q[:, None], (batch, chunks, *q.shape[1:])))
    folded = fold_query(flat(key_bases), queries, kv_heads)
    out, lse = kernel.attend_slots(
        folded, tokens, flat(begin), flat(end), scale=scale, size=most or tokens.keys.shape[2], interpret=interpret
    )
    out = expand_values(flat(value_bases), out, kv_heads)
    out, lse = (x.reshape(batch, chunks, *x.shape[1:]) for x in (out, lse))
    return merge([AttnPartial(out[:, i], lse[:, i]) for i in range(chunks)])


def by_reference(
    q, tokens, first, key_bases, value_bases, *, kv_heads, scale, q_positions, causal, window, most
) -> AttnPartial:
    """XLA: chunk after chunk, each over the blocks that hold it."""
    del most
    ranges = _chunk_ranges(tokens, first, *visible_range(tokens, q_positions, causal, window))

    def step(i, so_far):
        at = functools.partial(jax.lax.dynamic_index_in_dim, index=i, axis=1, keepdims=False)
        key_basis, value_basis, begin, end = (at(x) for x in (key_bases, value_bases, *ranges))
        out, lse = reference.attend_slots(fold_query(key_basis, q, kv_heads), tokens, begin, end, scale=scale)
        return merge([so_far, AttnPartial(expand_values(value_basis, out, kv_heads), lse)])

    batch, queries, heads, dim = q.shape
    return jax.lax.fori_loop(0, first.shape[1], step, empty_partial(batch, queries, heads, dim))


def _chunk_ranges(tokens, first, begin, end) -> tuple[jax.Array, jax.Array]:
    """Slots of each chunk that a query sees, int32 `[B, C, T]`."""
    size = tokens.keys.shape[2]
    after = jnp.concatenate([first[:, 1:], jnp.full_like(first[:, :1], size)], axis=1)
    return jnp.maximum(begin[:, None], first[..., None]), jnp.minimum(end[:, None], after[..., None])
