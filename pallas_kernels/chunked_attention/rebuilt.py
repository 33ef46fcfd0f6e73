"""XLA implementation for keys coded before RoPE: block by block, keys are rebuilt and rotated."""

import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import MASKED, logits_of
from lowrank_kv_jax.attention.partial import AttnPartial, from_sums
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.pallas_kernels.chunked_attention.pages import block_width, over_blocks, read_pages


def rebuilt_chunks(
    q, tokens, owner, k_bases, v_bases, *, page, rope, kv_heads, scale, q_positions, window, cap=None
) -> AttnPartial:
    """Arguments and result as of `chunked_attention`."""
    batch, queries, q_heads, dim = q.shape
    size, groups = tokens.keys.shape[2], tokens.keys.shape[1]
    shape = (batch, queries, groups, kv_heads // groups, q_heads // kv_heads, dim)  # b t j h g d
    ranks = tokens.keys.shape[3] + tokens.values.shape[3]
    # of a token: its key, or its share of the bases that are read for its page
    width = block_width(size, page, queries, batch * kv_heads * dim * max(1, ranks // page))
    q = q.reshape(shape)

    def step(i, carry):
        top, total, out = carry
        block = read_pages(i, tokens, owner, page, width, q, q_positions, window)
        k_basis, v_basis = (_by_head(bases.take(block.owner), shape).astype(q.dtype) for bases in (k_bases, v_bases))
        keys = jnp.einsum("bjpsr,bpjhdr->bjhpsd", block.keys, k_basis)
        cos, sin = (x.reshape(-1, 1, 1, *block.keys.shape[2:4], x.shape[-1]) for x in rope_angles(rope, block.positions))
        keys = rotate(keys, cos, sin)
        logits = jnp.einsum("btjhgd,bjhpsd->btjhgps", q, keys, preferred_element_type=jnp.float32)
        visible = block.visible[:, :, None, None, None]
        logits = jnp.where(visible, logits_of(logits, scale, cap), MASKED)
        new_top = jnp.maximum(top, logits.max((-2, -1)))
        weights = jnp.where(visible, jnp.exp(logits - new_top[..., None, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        added = jnp.einsum("btjhgps,bjpsr->bjpthgr", weights.astype(q.dtype), block.values)
        added = jnp.einsum("bjpthgr,bpjhdr->btjhgd", added, v_basis, preferred_element_type=jnp.float32)
        return new_top, total * shrink + weights.sum((-2, -1)), out * shrink[..., None] + added

    carry = (
        jnp.full(shape[:-1], MASKED, jnp.float32), jnp.zeros(shape[:-1], jnp.float32), jnp.zeros(shape, jnp.float32)
    )
    top, total, out = over_blocks(size, width, tokens.lengths, step, carry)
    heads = (batch, queries, q_heads)
    return from_sums(top.reshape(heads), total.reshape(heads), out.reshape(*heads, dim))


def _by_head(bases, shape):
    """`[B, P, J, W, R]` with the width split into heads and channels, `[B, P, J, H, D, R]`."""
    return bases.reshape(*bases.shape[:3], shape[3], shape[5], bases.shape[-1])
