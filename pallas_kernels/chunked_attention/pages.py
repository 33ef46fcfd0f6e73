"""Blocks of pages of a buffer, as both XLA ways of attending chunks read them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.storage.block_reads import block_for, even_block

BLOCK = 2048  # tokens, at least a page; measured fastest on XLA's CPU backend, where every block costs some time


class Pages(NamedTuple):
    """A block of P pages of S tokens each.

    Attributes:
        keys, values: `[B, J, P, S, R]`.
        owner: int `[B, P]`, the basis of each page.
        visible: bool `[B, 1 or T, P, S]`.
        positions: int `[B, P, S]`.
    """

    keys: jax.Array
    values: jax.Array
    owner: jax.Array
    visible: jax.Array
    positions: jax.Array


def block_width(size: int, page: int, queries: int, numbers: int) -> int:
    """Tokens of a block: whole pages; all of them where `block_for` says so of `queries` and `numbers` of a token."""
    even = even_block(size, max(BLOCK // page, 1) * page, page)
    return min(block_for(size, queries, numbers, even), size)


def read_pages(
    i: jax.Array | int, tokens: Any, owner: jax.Array, page: int, width: int, q: jax.Array, q_positions, window
) -> Pages:
    """Block `i`; the last one of a buffer may begin earlier and then hides what the block before has shown.

    Args:
        width: of a block, see `block_width`.
        q: queries `[B, T, ...]`, whose dtype is that of keys and values.
        tokens, owner, page, q_positions, window: as in `chunked_attention`.
    """
    batch, groups, size = tokens.keys.shape[:3]
    start = jnp.minimum(i * width, size - width)
    slots = start + jnp.arange(width)
    positions = tokens.positions.at(slots)
    mask = ((slots >= i * width)[None] & (slots[None] < tokens.lengths[:, None]))[:, None]
    if window is not None:
        mask = mask & (positions[:, None] > q_positions[:, :, None] - window)
    shape = (width // page, page)
    keys, values = (
        _read(x, start, width, q.dtype).reshape(batch, groups, *shape, -1) for x in (tokens.keys, tokens.values)
    )
    owners = jax.lax.dynamic_slice_in_dim(owner, start // page, shape[0], axis=1)
    return Pages(keys, values, owners, mask.reshape(batch, -1, *shape), positions.reshape(-1, *shape))


def over_blocks(size: int, width: int, lengths: jax.Array, step, carry):
    """`step(i, carry)` over the blocks that hold a token of some row: O(length), one block without a loop."""
    if size == width:
        return step(0, carry)
    return jax.lax.fori_loop(0, (jnp.max(lengths) + width - 1) // width, step, carry)


def _read(stored, start, width, dtype):
    if hasattr(stored, "read_block"):
        return stored.read_block(start, width).astype(dtype)
    return jax.lax.dynamic_slice_in_dim(stored, start, width, axis=2).astype(dtype)
