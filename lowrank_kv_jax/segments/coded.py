"""Tokens kept as coefficients in a basis that lives outside the segment."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from lowrank_kv_jax.storage import over_tokens, precise
from lowrank_kv_jax.storage.backend import platform
from lowrank_kv_jax.storage.bits import Bits
from lowrank_kv_jax.storage.block_reads import block_for, block_range, block_slots, slice_block
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.on_host import OnHost
from lowrank_kv_jax.storage.packed import PackedTokens, empty_packed, hold_packed
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import (
    COEFFICIENTS,
    QuantisedTokens,
    Tile,
    append_tokens,
    empty_tokens,
    encode_tiles,
    map_tokens,
    padded_to_tiles,
    read_tokens,
    without_padding,
)
from lowrank_kv_jax.storage.state import leaf, state
from lowrank_kv_jax.storage.steps import Steps
from lowrank_kv_jax.storage.water_filled import WaterFilled

Stored = jax.Array | QuantisedTokens | PackedTokens | WaterFilled


@state
class Coded:
    """Coefficients of keys and values, as arrays or in quantised storage.

    Attributes:
        k: `[B, J, S, Rk]`.
        v: `[B, J', S, Rv]`.
        length: int32 `[B]`, tokens held by each row.
        positions: a gap before the first token and one where the prompt's own exact tokens are missing; one by one
            where they were selected.
    """

    k: Stored = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    v: Stored = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs | PerHead


def empty_coded(
    batch: int, k_shape: tuple[int, int], v_shape: tuple[int, int], size: int, dtype, bits: int | None = None,
    k_tile: Tile = COEFFICIENTS, v_tile: Tile = COEFFICIENTS, positions: PerHead | None = None,
    whole_tiles: bool = True, gaps: int = 2,
) -> Coded:
    """An empty segment of `size` slots; shapes are (heads, rank) of the coefficients.

    Args:
        bits: 2, 4 or 8 for quantised storage; None stores `dtype`.
        k_tile, v_tile: what shares a scale there.
        positions: of selected tokens, of which the heads' lie packed in one buffer if they have an owner; by default
            those of a run.
        gaps: of a run's positions, before its first token and behind the prompt's own.
        whole_tiles: round `size` up to whole tiles, which tokens that are appended or transported need.
    """
    packed = positions is not None and positions.owner is not None
    if bits is not None and whole_tiles and not packed:
        most = max(k_tile.tokens, v_tile.tokens)
        size = -(-size // most) * most

    def empty(heads: int, rank: int, tile: Tile):
        if packed and bits is not None and tile.tokens > 1:
            return empty_packed(batch, positions.kv_heads, size, rank, bits, tile.tokens)
        return empty_tokens((batch, 1 if packed else heads, size, rank), bits, dtype, tile)

    k, v = (empty(*shape, tile) for shape, tile in ((k_shape, k_tile), (v_shape, v_tile)))
    return without_tokens(k, v, positions, gaps)


def without_tokens(k: Any, v: Any, positions: PerHead | None = None, gaps: int = 2) -> Coded:
    """An empty segment of empty storage `[B, J, S, R]`; see `empty_coded`."""
    batch, _, size, _ = k.shape
    nowhere = jnp.zeros((batch, gaps), jnp.int32)
    where = Runs(nowhere, nowhere) if positions is None else positions.with_slots(size)
    return Coded(k, v, jnp.zeros((batch,), jnp.int32), where)


def hold(segment: Any, k: jax.Array, v: jax.Array, counts: jax.Array, positions: Runs | PerHead) -> Any:
    """Put the first `counts[b]` of T coefficients `[B, J, T, R]` in the place of what a segment holds."""
    owner = positions.owner if isinstance(positions, PerHead) else None
    k, v = (fill_tokens(stored, x, counts, owner) for stored, x in ((segment.k, k), (segment.v, v)))
    return dataclasses.replace(segment, k=k, v=v, length=counts, positions=positions)


def fill_tokens(stored: Any, x: jax.Array, counts: jax.Array, owner: jax.Array | None = None) -> Any:
    """A buffer with the first `counts[b]` of T tokens `[B, J, T, R]`, as many of them as it has slots.

    Args:
        owner: `[B, 1, T]`, the heads of packed tokens, which come head after head.
    """
    slots = stored.shape[2]
    if isinstance(stored, PackedTokens):
        assert owner is not None
        return hold_packed(stored, x.astype(jnp.float32), owner, counts)
    x = x[:, :, :slots]
    if isinstance(stored, WaterFilled | OnHost):
        return stored.filled(x)
    if not isinstance(stored, QuantisedTokens):
        if x.shape[2] == slots:
            return narrow(x, stored.dtype)
        return stored.at[:, :, : x.shape[2]].set(narrow(x, stored.dtype))
    whole = -(-slots // stored.tile.tokens) * stored.tile.tokens
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, whole - x.shape[2]), (0, 0)))
    coded = encode_tiles(x, stored.bits, stored.tile, jnp.arange(whole)[None] < counts[:, None])
    return dataclasses.replace(coded, codes=coded.codes[:, :, :slots])


def append(segment: Any, k: jax.Array, v: jax.Array, counts: jax.Array, position: jax.Array | None = None) -> Any:
    """Append the first `counts[b]` of T coefficients `[B, J, T, R]`; O(T).

    Args:
        position: int32 `[B, J, T]`, theirs in a segment that holds those of each head, not packed; None: a run goes on.
    """
    k, v = (append_tokens(stored, x, segment.length, counts) for stored, x in ((segment.k, k), (segment.v, v)))
    where = segment.positions
    if position is not None:
        each = append_tokens(where.position[..., None], position[..., None], segment.length, counts)[..., 0]
        where = PerHead(each, None, where.kv_heads)
    return dataclasses.replace(segment, k=k, v=v, length=segment.length + counts, positions=where)


def in_whole_tiles(segment: Any) -> Any:
    """A segment whose quantised storage ends with a tile, as what is appended or transported needs it."""
    return dataclasses.replace(segment, k=padded_to_tiles(segment.k), v=padded_to_tiles(segment.v))


def cut_to(segment: Any, size: int) -> Any:
    """A segment of the first `size` slots of what `in_whole_tiles` returned."""
    return dataclasses.replace(segment, k=without_padding(segment.k, size), v=without_padding(segment.v, size))


def cached_tokens(segment: Coded) -> CachedTokens:
    """The segment as the attention ops take it."""
    return CachedTokens(segment.k, segment.v, segment.length, segment.positions)


def transport(
    segment: Any, side: str, old: jax.Array, new: jax.Array, steps: Steps | None = None, after: Steps | None = None
) -> Any:
    """Coefficients of "k" or "v", to be read in a basis that has moved: C <- C U_old^T U_new; bases `[B, J, W, R]`.

    What the old basis had kept and the new one does not is lost; nothing is silently reinterpreted. Block by block in
    place up to the longest row: O(length) work, and no second copy of the cache. A row whose basis has not moved keeps
    its coefficients. Quantised ones of a row that did are quantised anew, which adds half a step of error each time:
    negligible in 8 bits, not in 4 or 2.

    Args:
        steps, after: what codes count in, before and behind the move; None where coefficients are stored as they are.
    """
    known = change_of_basis(old, new), steps, after
    return change_tokens(segment, side, _transported, moved_rows(segment, old, new), *known)


def _transported(x: jax.Array, move: jax.Array, steps: Steps | None, after: Steps | None) -> jax.Array:
    if _in_16_bits(x):  # what is rounded is the change alone, to the precision of what comes out
        change = (move - jnp.eye(move.shape[-1], dtype=move.dtype)).astype(x.dtype)
        return x.astype(jnp.float32) + jnp.matmul(x, change, preferred_element_type=jnp.float32)
    moved = precise.matmul(x.astype(jnp.float32) if steps is None else steps.widen(x), move)
    return moved if after is None else after.count(moved)


def stored_moment(segment: Any, side: str, steps: Steps | None = None) -> Float32[jax.Array, "B U R R"]:
    """Sum of c c^T over the tokens that each row holds, of coefficients of "k" or "v", in each head's basis.

    Block by block up to the longest row: O(length) work, and no copy of the cache.

    Args:
        steps: what codes count in; None where coefficients are stored as they are.
    """
    def of_device(number: jax.Array, segment: Any, steps: Steps | None) -> jax.Array:
        return over_tokens.summed(_moment(side, over_tokens.own_segments(number, segment), steps))

    return over_tokens.on_each(of_device, segment, steps)


def _moment(side: str, segment: Any, steps: Steps | None) -> jax.Array:
    stored, where = getattr(segment, side), segment.positions
    owner = where.owner if isinstance(where, PerHead) else None
    batch, heads, size, rank = stored.shape
    heads = heads if owner is None else where.kv_heads
    width = block_for(size, 0, batch * heads * rank)

    def add(i, total):
        start, slots, fresh = block_slots(i, size, width)
        block = slice_block(stored, start, width)
        there = jnp.broadcast_to((fresh & (slots < segment.length[:, None]))[:, None], (batch, heads, len(slots)))
        if owner is not None:
            there = there & (jnp.take(owner, slots, axis=2) == jnp.arange(heads, dtype=owner.dtype)[:, None])
            block = jnp.broadcast_to(block, (batch, heads, *block.shape[2:]))
        wide = block if steps is None else steps.widen(block)
        wide = jnp.where(there[..., None], wide, jnp.zeros((), wide.dtype))
        return total + _gram(wide)

    nothing = jnp.zeros((batch, heads, rank, rank), jnp.float32)
    return jax.lax.fori_loop(*block_range(size, segment.length, block=width), add, nothing)


def _gram(x: jax.Array) -> jax.Array:
    """X^T X `[B, J, R, R]` of `[B, J, S, R]`, in float32, in which products of 16-bit numbers are exact."""
    if _in_16_bits(x):
        return jnp.matmul(x.mT, x, preferred_element_type=jnp.float32)
    return precise.gram(x)


def _in_16_bits(x: jax.Array) -> bool:
    """Whether an accelerator is to multiply tokens as they are stored; a CPU widens them."""
    return platform() != "cpu" and x.dtype in (jnp.bfloat16, jnp.float16)


def moved_rows(segment: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """Rows whose basis has moved, bool `[B]`."""
    return jnp.broadcast_to(jnp.any(old != new, axis=(1, 2, 3)), segment.length.shape)


def change_of_basis(old: jax.Array, new: jax.Array) -> jax.Array:
    """What takes coefficients in one basis `[B, J, W, R]` to those in another, float32 `[B, J, R, R]`.

    Bases are rounded to the dtype that they are stored in, after which U^T U is not quite 1, an error that would grow
    with every refresh: the least-squares coefficients divide by it, here by one Newton step.
    """
    old, new = old.astype(jnp.float32), new.astype(jnp.float32)
    correction = 2 * jnp.eye(new.shape[-1]) - precise.matmul(new.mT, new)
    return precise.matmul(precise.matmul(old.mT, new), correction)


def change_tokens(segment: Any, side: str, change: Callable[..., jax.Array], rows: jax.Array, *known: Any) -> Any:
    """Coefficients of "k" or "v" of the `rows` bool `[B]` by `change(tokens, *known)`, `[B, J, T, R]` to the same shape.

    Those of packed heads are changed as every head would, and each slot takes what its owner did.
    """
    stored, where = getattr(segment, side), segment.positions
    owner = where.owner if isinstance(where, PerHead) else None
    if owner is None:
        return map_tokens(stored, segment.length, change, rows, *known)
    x = read_tokens(stored) if hasattr(stored, "read_block") else stored.astype(jnp.float32)
    x = jnp.broadcast_to(x, (x.shape[0], where.kv_heads, *x.shape[2:]))
    stored = stored.widened() if isinstance(stored, Bits) else stored
    changed = fill_tokens(stored, owned_rows(change(x, *known), owner), segment.length, owner)
    return jax.tree.map(
        lambda new, old: jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old), changed, stored
    )


def owned_rows(x: jax.Array, owner: jax.Array) -> jax.Array:
    """Of `[B, K, S, R]` the row of each slot's owner `[B, 1, S]`: `[B, 1, S, R]`; what is `[B, 1, S, R]` stays."""
    if x.shape[1] == 1:
        return x
    index = jnp.broadcast_to(owner[..., None].astype(jnp.int32), (*owner.shape, x.shape[-1]))
    return jnp.take_along_axis(x, index, axis=1)
