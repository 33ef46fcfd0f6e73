"""XLA implementation for keys coded after RoPE: each basis is read once for all of its tokens.

Queries are folded into every basis in use, before tokens are read; what tokens give is summed basis by basis, in
coefficients, and expanded at the end. A page costs what its coefficients cost, a basis what its numbers cost.
"""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import MASKED, logits_of
from lowrank_kv_jax.attention.partial import AttnPartial, from_sums
from lowrank_kv_jax.pallas_kernels.chunked_attention.pages import block_width, over_blocks, read_pages
from lowrank_kv_jax.storage.chunk_bases import ChunkBases

TOGETHER = 32  # bases in one product; more are a loop over those in use, each time a copy of so many


def folded_chunks(
    q, tokens, owner, k_bases, v_bases, *, page, kv_heads, scale, q_positions, window, cap=None
) -> AttnPartial:
    """Arguments and result as of `chunked_attention`."""
    batch, queries, q_heads, dim = q.shape
    groups, size = tokens.keys.shape[1:3]
    inner, per_head = kv_heads // groups, q_heads // kv_heads
    rows = (batch, groups, inner, queries * per_head)  # b j h m
    width = block_width(size, page, queries, batch * queries * q_heads)
    q = q.reshape(batch, queries, groups, inner, per_head, dim)
    used = _used(owner, tokens.lengths, page)
    folded = _fold(q.transpose(0, 2, 3, 1, 4, 5).reshape(*rows, dim), k_bases, used)
    folded = folded.swapaxes(1, 2)  # b j c (h m) r: here and not once a block

    def step(i, carry):
        top, total, out = carry
        block = read_pages(i, tokens, owner, page, width, q, q_positions, window)
        query = jax.vmap(lambda x, i: jnp.take(x, i, axis=1))(folded, block.owner)
        logits = jnp.einsum("bjpmr,bjpsr->bjpms", query, block.keys, preferred_element_type=jnp.float32)
        visible = _of_rows(block.visible, rows, queries)
        logits = jnp.where(visible, logits_of(logits, scale, cap), MASKED)
        new_top = jnp.maximum(top, logits.max((2, 4)))
        weights = jnp.where(visible, jnp.exp(logits - new_top[:, :, None, :, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        added = jnp.einsum(
            "bjpms,bjpsr->bjpmr", weights.astype(q.dtype), block.values, preferred_element_type=jnp.float32
        )
        added = _by_basis(added, block.owner, k_bases.capacity)
        return new_top, total * shrink + weights.sum((2, 4)), out * shrink[:, :, None, :, None] + added

    flat = (batch, groups, inner * rows[-1])
    carry = (
        jnp.full(flat, MASKED, jnp.float32), jnp.zeros(flat, jnp.float32),
        jnp.zeros((batch, groups, v_bases.capacity, flat[-1], tokens.values.shape[-1]), jnp.float32),
    )
    top, total, out = over_blocks(size, width, tokens.lengths, step, carry)
    out = _expand(out.swapaxes(1, 2).astype(q.dtype), v_bases, used, (inner, dim))

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
    """Sums of `[B, J, P, M, R]` over the pages of each basis, `[B, J, C, M, R]`."""
    if count == 1:
        return x.sum(2, keepdims=True)
    hot = (owner[:, None] == jnp.arange(count)[:, None]).astype(x.dtype)
    flat = jnp.einsum("bcp,bjpx->bjcx", hot, x.reshape(*x.shape[:3], -1))
    return flat.reshape(*flat.shape[:3], *x.shape[3:])


def _fold(q: jax.Array, bases: ChunkBases, used: jax.Array) -> jax.Array:
    """Queries `[B, J, H, M, D]` in each basis, `[B, C, J, H M, R]`; 0 beyond those in use."""
    batch, groups, inner, rows, dim = q.shape

    def step(basis, begin, fresh, folded):
        basis = basis.reshape(*basis.shape[:3], inner, dim, -1)
        spread = jnp.broadcast_to(q[:, None], (batch, basis.shape[1], *q.shape[1:]))  # else bases are laid out by head
        some = jnp.einsum("bcjhmd,bcjhdr->bcjhmr", spread, basis).reshape(*basis.shape[:3], inner * rows, -1)
        return jax.lax.dynamic_update_slice_in_dim(folded, some, begin, axis=1)

    shape = (batch, bases.capacity, groups, inner * rows, bases.codes.shape[-1])
    return _over_bases(bases, used, q.dtype, False, step, jnp.zeros(shape, q.dtype))


def _expand(x: jax.Array, bases: ChunkBases, used: jax.Array, width: tuple[int, int]) -> jax.Array:
    """Sum over bases of coefficients `[B, C, J, H M, R]` in head space, float32 `[B, J, H, M, D]`."""
    inner, dim = width
    x = x.reshape(*x.shape[:3], inner, -1, x.shape[-1])

    def step(basis, begin, fresh, total):
        basis = basis.reshape(*basis.shape[:4], inner, dim)
        some = jax.lax.dynamic_slice_in_dim(x, begin, basis.shape[1], axis=1)
        some = jnp.where(fresh[:, None, None, None, None], some, 0)
        return total + jnp.einsum("bcjhmr,bcjrhd->bcjhmd", some, basis, preferred_element_type=jnp.float32).sum(1)

    batch, _, groups, _, rows, _ = x.shape
    return _over_bases(bases, used, x.dtype, True, step, jnp.zeros((batch, groups, inner, rows, dim), jnp.float32))


def _over_bases(bases: ChunkBases, used: jax.Array, dtype, by_rows: bool, step, carry):
    """`step(some bases, columns or rows, number of the first, which are fresh, carry)` until those in use have been seen.

    The last part begins earlier where parts do not fill the slots; what the part before has shown is not fresh.
    """
    parts = -(-bases.capacity // TOGETHER)
    size = -(-bases.capacity // parts)

    def part(i, carry):
        begin = jnp.minimum(i * size, bases.capacity - size)
        return step(bases.part(begin, size, dtype, by_rows), begin, begin + jnp.arange(size) >= i * size, carry)

    return part(0, carry) if parts == 1 else jax.lax.fori_loop(0, (used + size - 1) // size, part, carry)
