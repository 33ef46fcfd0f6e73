"""XLA implementation: blocks of pages, each page against the query folded into its basis."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.pallas_kernels.blockwise import BLOCK, MASKED
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.rope import rope_angles, rotate


def chunked_attention(
    q, tokens, owner, k_bases, v_bases, *, page, rope, kv_heads, scale, q_positions, window
) -> AttnPartial:
    batch, queries, q_heads, dim = q.shape
    size, groups = tokens.keys.shape[2], tokens.keys.shape[1]
    width = min(page * max(1, BLOCK // page), size)
    shape = (batch, queries, groups, kv_heads // groups, q_heads // kv_heads, dim)  # b t j h g d
    q = q.reshape(shape)

    def step(i, carry):
        top, total, out = carry
        start = jnp.minimum(i * width, size - width)
        slots = start + jnp.arange(width)
        mask, positions = _visible(tokens, slots, slots >= i * width, q_positions, window)
        pages = jax.lax.dynamic_slice_in_dim(owner, start // page, width // page, axis=1)
        keys, values = (
            _read(x, start, width, q.dtype).reshape(batch, groups, width // page, page, -1)
            for x in (tokens.keys, tokens.values)
        )
        k_basis, v_basis = (_by_head(bases.take(pages), shape).astype(q.dtype) for bases in (k_bases, v_bases))
        if rope is None:
            folded = jnp.einsum("btjhgd,bpjhdr->bjpthgr", q, k_basis)
            logits = jnp.einsum("bjpthgr,bjpsr->btjhgps", folded, keys, preferred_element_type=jnp.float32)
        else:
            rebuilt = jnp.einsum("bjpsr,bpjhdr->bjhpsd", keys, k_basis)
            cos, sin = (x.reshape(batch, 1, 1, *keys.shape[2:4], -1) for x in rope_angles(rope, positions))
            rotated = rotate(rebuilt, cos, sin)
            logits = jnp.einsum("btjhgd,bjhpsd->btjhgps", q, rotated, preferred_element_type=jnp.float32)
        visible = mask.reshape(batch, -1, 1, 1, 1, *keys.shape[2:4])
        logits = jnp.where(visible, logits * scale, MASKED)
        new_top = jnp.maximum(top, logits.max((-2, -1)))
        weights = jnp.where(visible, jnp.exp(logits - new_top[..., None, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        added = jnp.einsum("btjhgps,bjpsr->bjpthgr", weights.astype(q.dtype), values)
        added = jnp.einsum("bjpthgr,bpjhdr->btjhgd", added, v_basis, preferred_element_type=jnp.float32)
        return new_top, total * shrink + weights.sum((-2, -1)), out * shrink[..., None] + added

    carry = (
        jnp.full(shape[:-1], MASKED, jnp.float32), jnp.zeros(shape[:-1], jnp.float32), jnp.zeros(shape, jnp.float32)
    )
    if size == width:
        top, total, out = step(0, carry)
    else:
        last = (jnp.max(tokens.lengths) + width - 1) // width
        top, total, out = jax.lax.fori_loop(0, last, step, carry)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    heads = (batch, queries, q_heads)
    return AttnPartial((out / total[..., None]).reshape(*heads, dim), lse.reshape(heads))


def _visible(tokens, slots, fresh, q_positions, window):
    """bool `[B, 1 or T, S]` and positions `[B, S]`; every token lies before every query."""
    positions = tokens.positions.at(slots)
    mask = (fresh & (slots[None] < tokens.lengths[:, None]))[:, None]
    if window is not None:
        mask = mask & (positions[:, None] > q_positions[:, :, None] - window)
    return mask, positions


def _read(stored, start, width, dtype):
    if hasattr(stored, "read_block"):
        return stored.read_block(start, width).astype(dtype)
    return jax.lax.dynamic_slice_in_dim(stored, start, width, axis=2).astype(dtype)


def _by_head(bases, shape):
    """`[B, P, J, W, R]` with the width split into heads and channels, `[B, P, J, H, D, R]`."""
    return bases.reshape(*bases.shape[:3], shape[3], shape[5], bases.shape[-1])
