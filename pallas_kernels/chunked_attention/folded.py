"""XLA implementation for keys coded after RoPE: each basis is read once for all of its tokens.

Queries are folded into every basis in use, before tokens are read; what tokens give is summed basis by basis, in
coefficients, and expanded at the end. A page costs what its coefficients cost, a basis what its numbers cost.
"""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.chunk_bases import ChunkBases
from lowrank_kv_jax.pallas_kernels.blockwise import MASKED
from lowrank_kv_jax.pallas_kernels.chunked_attention.pages import over_blocks, read_pages
from lowrank_kv_jax.partial import AttnPartial, from_sums

TOGETHER = 32  # bases in one product; more are a loop over those in use, each time a copy of so many


def folded_chunks(q, tokens, owner, k_bases, v_bases, *, page, kv_heads, scale, q_positions, window) -> AttnPartial:
    """Arguments and result as of `chunked_attention`."""
    batch, queries, q_heads, dim = q.shape
    groups, size = tokens.keys.shape[1:3]
    inner, per_head = kv_heads // groups, q_heads // kv_heads
    rows = (batch, groups, inner, queries * per_head)  # b j h m
    q = q.reshape(batch, queries, groups, inner, per_head, dim)
    used = _used(owner, tokens.lengths, page)
    folded = _fold(q.transpose(0, 2, 3, 1, 4, 5).reshape(*rows, dim), k_bases, used)  # b c j (h m) r

    def step(i, carry):
        top, total, out = carry
        block = read_pages(i, tokens, owner, page, q, q_positions, window)
        query = jax.vmap(lambda x, i: jnp.take(x, i, axis=0))(folded, block.owner).swapaxes(1, 2)
        logits = jnp.einsum("bjpmr,bjpsr->bjpms", query, block.keys, preferred_element_type=jnp.float32)
        visible = _of_rows(block.visible, rows, queries)
        logits = jnp.where(visible, logits * scale, MASKED)
        new_top = jnp.maximum(top, logits.max((2, 4)))
        weights = jnp.where(visible, jnp.exp(logits - new_top[:, :, None, :, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        added = jnp.einsum(
            "bjpms,bjpsr->bjpmr", weights.astype(q.dtype), block.values, preferred_element_type=jnp.float32
        )
        added = _by_basis(added, block.owner, k_bases.capacity)
        return new_top, total * shrink + weights.sum((2, 4)), out * shrink[:, None, ..., None] + added

    flat = (batch, groups, inner * rows[-1])
    carry = (
        jnp.full(flat, MASKED, jnp.float32), jnp.zeros(flat, jnp.float32),
        jnp.zeros((batch, v_bases.capacity, *flat[1:], tokens.values.shape[-1]), jnp.float32),
    )
    top, total, out = over_blocks(size, page, tokens.lengths, step, carry)
    out = _expand(out.astype(q.dtype), v_bases, used, (inner, dim))

    def heads(x):
        x = x.reshape(batch, groups, inner, queries, per_head, -1)
        return x.transpose(0, 3, 1, 2, 4, 5).reshape(batch, queries, q_heads, -1)

    return from_sums(heads(top)[..., 0], heads(total)[..., 0], heads(out))


def _used(owner: jax.Array, lengths: jax.Array, page: int) -> jax.Array:
    """Bases up to the last one that a token of any row is read in."""
    held = jnp.arange(owner.shape[1]) * page < lengths[:, None]
    return jnp.max(jnp.where(held, owner + 1, 0))


def _of_rows(visible: jax.Array, rows, queries: int) -> jax.Array:
    """`[B, 1 or T, P, S]` for logits `[B, J, P, M, S]`, whose rows are heads, queries and heads of a group."""
    visible = visible[:, None].swapaxes(2, 3)  # b 1 p t s
    if visible.shape[3] == 1:
        return visible
    visible = jnp.repeat(visible, rows[-1] // queries, axis=3)
    return jnp.tile(visible, (1, 1, 1, rows[2], 1))


def _by_basis(x: jax.Array, owner: jax.Array, count: int) -> jax.Array:
    """Sums of `[B, J, P, M, R]` over the pages of each basis, `[B, C, J, M, R]`."""
    if count == 1:
        return x.sum(2)[:, None]
    hot = (owner[:, None] == jnp.arange(count)[:, None]).astype(x.dtype)
    flat = jnp.einsum("bcp,bjpx->bjcx", hot, x.reshape(*x.shape[:3], -1))
    return flat.reshape(*flat.shape[:3], *x.shape[3:]).swapaxes(1, 2)


def _fold(q: jax.Array, bases: ChunkBases, used: jax.Array) -> jax.Array:
    """Queries `[B, J, H, M, D]` in each basis, `[B, C, J, H M, R]`; 0 beyond those in use."""
    batch, groups, inner, rows, dim = q.shape

    def some(basis):
        basis = basis.reshape(*basis.shape[:3], inner, dim, -1)
        spread = jnp.broadcast_to(q[:, None], (batch, basis.shape[1], *q.shape[1:]))  # no copy of bases by head
        return jnp.einsum("bcjhmd,bcjhdr->bcjhmr", spread, basis).reshape(*basis.shape[:3], inner * rows, -1)

    return _map_bases(some, bases, used, q.dtype)


def _expand(x: jax.Array, bases: ChunkBases, used: jax.Array, width: tuple[int, int]) -> jax.Array:
    """Sum over bases of coefficients `[B, C, J, H M, R]` in head space, float32 `[B, J, H, M, D]`."""
    inner, dim = width
    x = x.reshape(*x.shape[:3], inner, -1, x.shape[-1])

    def some(basis, x):
        basis = basis.reshape(*basis.shape[:3], inner, dim, -1)
        return jnp.einsum("bcjhmr,bcjhdr->bcjhmd", x, basis, preferred_element_type=jnp.float32)

    return _sum_bases(some, bases, used, x)


def _parts(bases: ChunkBases, used: jax.Array) -> tuple[int, jax.Array]:
    """Bases in one product, and how many products hold those in use."""
    count = -(-bases.capacity // TOGETHER)
    together = -(-bases.capacity // count)
    return together, (used + together - 1) // together


def _map_bases(some, bases: ChunkBases, used: jax.Array, dtype) -> jax.Array:
    if bases.capacity <= TOGETHER:
        return some(bases.part(0, bases.capacity, dtype))
    together, count = _parts(bases, used)
    shape = jax.eval_shape(lambda: some(bases.part(0, together, dtype)))
    whole = jnp.zeros((shape.shape[0], bases.capacity, *shape.shape[2:]), shape.dtype)

    def step(i, whole):
        begin = jnp.minimum(i * together, bases.capacity - together)
        return jax.lax.dynamic_update_slice_in_dim(whole, some(bases.part(begin, together, dtype)), begin, axis=1)

    return jax.lax.fori_loop(0, count, step, whole)


def _sum_bases(some, bases: ChunkBases, used: jax.Array, x: jax.Array) -> jax.Array:
    if bases.capacity <= TOGETHER:
        return some(bases.part(0, bases.capacity, x.dtype), x).sum(1)
    together, count = _parts(bases, used)
    shape = jax.eval_shape(lambda: some(bases.part(0, together, x.dtype), x[:, :together]).sum(1))

    def step(i, total):
        begin = jnp.minimum(i * together, bases.capacity - together)
        fresh = begin + jnp.arange(together) >= i * together
        part = jax.lax.dynamic_slice_in_dim(x, begin, together, axis=1)
        part = jnp.where(fresh[:, None, None, None, None], part, 0)
        return total + some(bases.part(begin, together, x.dtype), part).sum(1)

    return jax.lax.fori_loop(0, count, step, jnp.zeros(shape.shape, shape.dtype))
