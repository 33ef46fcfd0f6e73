"""The op in XLA where keys were coded turned by their place in a tile: queries are folded once a tile, no key is rebuilt.

That takes tokens that lie tile by tile, in order; of others, and of many queries, keys are rebuilt.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.blockwise import blockwise_attention, spread_heads
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec, rope_angles, rotate
from lowrank_kv_jax.attention.turning import TILE, place_in_tile, turning_columns, turning_weights
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.block_angles import block_angles
from lowrank_kv_jax.storage.backend import multiplies_16_bits, platform
from lowrank_kv_jax.storage.basis import split_heads
from lowrank_kv_jax.storage.block_reads import (
    block_for,
    block_slots,
    parts_are_tokens_last,
    slice_parts,
    visible_blocks,
    visible_slots,
)
from lowrank_kv_jax.storage.positions import Runs

AT_ONCE = 2
"""Blocks that a CPU works on: their products are too small to be shared out over its cores."""


def pays(q: jax.Array, tokens: Any, kv_heads: int, rope: RopeSpec | None) -> bool:
    """Whether tokens lie tile by tile, and queries are so few that folding them takes less than rebuilding keys."""
    _, queries, heads, dim = q.shape
    size, block = tokens.keys.shape[2], _block(q, tokens)
    begins = block == TILE or block >= size or size % TILE == 0  # whether each block begins with a tile
    return (rope is not None and tile_by_tile(tokens) and begins and 2 * queries * heads <= kv_heads * dim
            and tokens.values.shape[1] <= tokens.keys.shape[1])


def product_dtype(q: jax.Array, keys: Any) -> Any:
    """What codes are multiplied in: the queries' dtype, or bfloat16, of which a CPU that has it multiplies twice as many.

    Packed codes, whole numbers and a half, lose nothing by that; what they meet is rounded by a 512th at most.
    """
    packed = q.dtype == jnp.float32 and parts_are_tokens_last(keys)
    return jnp.bfloat16 if packed and multiplies_16_bits() else q.dtype


def tile_by_tile(tokens: Any) -> bool:
    """Whether tokens lie in order, so that slots and positions begin tiles together; on a device that has some of the
    slots, where it has whole tiles of them."""
    if not isinstance(tokens.positions, Runs):
        return False
    runs = tokens.positions.start.shape[1]
    return runs == 2 or runs == 3 and tokens.keys.shape[2] % TILE == 0


def check(tokens: Any, rope: RopeSpec | None) -> None:
    """Raise `Unsupported` for what no kernel folds queries for."""
    if rope is None or not tile_by_tile(tokens):
        raise Unsupported("keys that are turned by their place in a tile, of tokens in no order")


def begins_of(tokens: Any, origin: int) -> jax.Array:
    """Positions at which all tiles begin, int32 `[B, n]`, that are counted from position `origin` on."""
    known = tokens.positions.at(jnp.arange(0, tokens.keys.shape[2], TILE))
    return known - place_in_tile(known, origin)


def by_component(basis: jax.Array, kv_heads: int, dtype: Any) -> jax.Array:
    """A basis as `folded` takes it, `[.., J, K / J, R, D]`: laid so once, and not at every block that it meets."""
    return jax.lax.optimization_barrier(split_heads(basis, kv_heads).mT.astype(dtype))


def folded(q: jax.Array, basis: jax.Array, rope: RopeSpec, begins: jax.Array) -> jax.Array:
    """Queries `[B, n, T, N, R]` turned back to where n tiles begin, at positions `[B, n]`, and folded; `basis` as
    `by_component` gives it."""
    back, (groups, each) = turned_back(q, rope, begins), basis.shape[-4:-2]
    rows = "b" if basis.ndim == 5 else ""
    by_head = back.reshape(*back.shape[:3], groups, each, -1, q.shape[-1])
    return jnp.einsum(f"bntjhgd,{rows}jhrd->bntjhgr", by_head, basis).reshape(*back.shape[:-1], -1)


def turned_back(q: jax.Array, rope: RopeSpec, begins: jax.Array) -> jax.Array:
    """Queries `[B, n, T, N, D]` of `[B, T, N, D]`, as n tiles that begin at positions `[B, n]` meet them."""
    batch, *rest = q.shape
    cos, sin = rope_angles(rope, begins[:, :, None, None])
    return rotate(jnp.broadcast_to(q[:, None], (batch, begins.shape[1], *rest)), cos, -sin)


def attend(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, key_mean, origin, cap
) -> AttnPartial:
    """As `reference.rotary_coefficient_attention`, of tokens whose slots and positions begin tiles together."""
    groups, size = tokens.keys.shape[1:3]
    batch, queries, heads, _ = q.shape
    block = _block(q, tokens)
    weights = None if key_mean is None else turning_weights(rope, q, key_mean)
    basis, dtype = by_component(key_basis, kv_heads, q.dtype), product_dtype(q, tokens.keys)

    def by_rows(x: jax.Array) -> jax.Array:
        """`[B, J, .., T * N / J, R]` of `[B, .., T, N, R]`, in the order of `blockwise_attention`."""
        *lead, _, _, width = x.shape
        x = jnp.moveaxis(x.reshape(*lead, queries, groups, heads // groups, width), -3, 1)
        return x.reshape(batch, groups, *lead[1:], -1, width)

    def read(i):
        start, slots, fresh = block_slots(i, size, block)
        mask, positions = visible_slots(tokens, slots, fresh, q_positions, causal, window, heads)
        parts = tuple(x.astype(dtype) for x in slice_parts(tokens.keys, start, block))
        if tokens.values is tokens.keys:
            parts = values = jax.lax.optimization_barrier(parts)  # else each product would unpack them for itself
        else:
            values = slice_parts(tokens.values, start, block)
        # of a last block that begins earlier the last token's tile alone is not hidden
        known = positions[:, 0, -1:] if len(slots) <= TILE else positions[:, 0, ::TILE]

        def products(_):
            met = folded(q, basis, rope, known - place_in_tile(known, origin)).astype(dtype)
            found = _of_tiles(by_rows(met), parts, parts_are_tokens_last(tokens.keys))
            if weights is None:
                return found
            angles = block_angles(rope, tokens.positions, positions, start)
            more = turning_columns(*angles, weights.shape[-1])[:, 0]
            return found + jnp.einsum("bjma,bas->bjms", by_rows(weights), more, precision=jax.lax.Precision.HIGH)

        return products, tuple(spread_heads(x, groups) for x in values), mask

    first, end = visible_blocks(tokens, q_positions, window, block)
    return blockwise_attention(
        q.astype(dtype), read, first, end, shared_heads=groups, value_dim=tokens.values.shape[-1], scale=scale, cap=cap,
        values_last=parts_are_tokens_last(tokens.values), together=AT_ONCE if platform() == "cpu" else 1,
    )


def _block(q: jax.Array, tokens: Any) -> int:
    """Tokens of a block: so many that neither their logits nor their codes, as numbers, are too much at once."""
    batch, queries, heads, _ = q.shape
    _, groups, size, components = tokens.keys.shape
    return block_for(size, queries, batch * max(2 * queries * heads, groups * components), TILE)


def _of_tiles(q: jax.Array, parts: tuple[jax.Array, ...], tokens_last: bool) -> jax.Array:
    """Products float32 `[B, J, M, S]` of each tile's queries `[B, J, n, M, R]` and its tokens, columns side by side
    `[B, J, S, .]` or `[B, J, ., S]`; of several tiles the last may be shorter."""
    batch, groups, count, rows, _ = q.shape
    axis = 2 if tokens_last else 3  # of the components
    size, widths = parts[0].shape[5 - axis], [x.shape[axis] for x in parts]
    each = jnp.split(q, np.cumsum(widths)[:-1], axis=-1)
    product = "bjnmr,bjrnt->bjnmt" if tokens_last else "bjnmr,bjntr->bjnmt"

    def tiled(x: jax.Array) -> jax.Array:
        if count == 1:
            return jnp.expand_dims(x, 5 - axis)
        more = [(0, 0)] * 4
        more[5 - axis] = (0, count * TILE - size)
        x = jnp.pad(x, more)
        return x.reshape(*x.shape[: 5 - axis], count, TILE, *x.shape[6 - axis :])

    found = sum(jnp.einsum(product, own, tiled(x).astype(q.dtype), preferred_element_type=jnp.float32)
                for own, x in zip(each, parts, strict=True))
    return found.swapaxes(2, 3).reshape(batch, groups, rows, -1)[..., :size]
