"""Online softmax on a GPU: what the Triton kernels share to load blocks of tokens, weigh them and write a partial."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels import packing
from lowrank_kv_jax.pallas_kernels.gpu_grid import LEAST_TILE, Grid
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, LOG2_E, empty_of, power_of_two
from lowrank_kv_jax.storage.eight_bits import SCALE

BESIDE_BYTES = 80 * 1024  # of other tokens under way at most, so that two programs share a core


def split_range(tiles, grid: Grid):
    """This program's share of `tiles`: those that are valid, not those of the buffer, are shared out."""
    each = jnp.maximum(pl.cdiv(tiles, grid.splits), min(2, grid.splits))
    start = pl.program_id(0) * each
    return start, jnp.minimum(start + each, tiles)


class Limits(NamedTuple):
    """References to what a row's programs are told.

    Attributes:
        begin, end: int32 `[T]`, the slots that a query sees: begin <= slot < end.
        told: int32 `[n]` each, what else there is to know.
        beside: `Others`.
    """

    begin: Any
    end: Any
    told: tuple[Any, ...]
    beside: Sequence["Others"]


class Others(NamedTuple):
    """References to other tokens, as they are, which the splits share as they do the stored ones.

    Attributes:
        begin, end: as of `Limits`.
        q: their queries `[M, D]`.
        keys, values: them, `[S, D]`.
    """

    begin: Any
    end: Any
    q: Any
    keys: Any
    values: Any


def span(limits: Limits | Others):
    """The lowest begin and the highest end of queries that see something; (0, 0) where none does."""
    count = limits.begin.shape[0]
    if count == 1:
        begin, end = limits.begin[0], limits.end[0]
        sees = end > begin
        return jnp.where(sees, begin, 0), jnp.where(sees, end, 0)
    at = jnp.arange(power_of_two(count, 2))
    begin, end = (plgpu.load(ref.at[at], mask=at < count, other=0) for ref in (limits.begin, limits.end))
    sees = end > begin
    high = jnp.max(jnp.where(sees, end, 0))
    return jnp.where(high > 0, jnp.min(jnp.where(sees, begin, jnp.iinfo(jnp.int32).max)), 0), high


def tile_range(limits: Limits, grid: Grid):
    """The tiles of this program's split, and the end of the valid slots."""
    low, high = span(limits)
    first = low // grid.tile
    start, stop = split_range(pl.cdiv(high, grid.tile) - first, grid)
    return first + start, first + stop, high


def load_ranges(limits: Limits | Others, rows: int, there: int):
    """begin and end `[rows]` for `there` query rows, as `pack` orders them; those beyond see nothing."""
    row, each = jnp.arange(rows), there // limits.begin.shape[0]
    return tuple(plgpu.load(ref.at[row // each], mask=row < there, other=0) for ref in (limits.begin, limits.end))


def load_block(ref, start, rows, piece: tuple[int, int]):
    """Some columns of n rows of `ref` `[.., R]` from row `start`; zeros where not `rows` `[n]`, and beyond R."""
    return plgpu.load(_block(ref, start, rows.shape[0], piece), mask=_inside(rows, piece, ref.shape[-1]), other=0)


def load_columns(ref, start, rows, columns):
    """Some columns `[w]` of n rows of `ref` `[.., R]` from row `start`, in any order; zeros where not `rows` `[n]`, and
    beyond R."""
    at = tuple(jnp.broadcast_to(x, (rows.shape[0], columns.shape[0]))
               for x in (start + jnp.arange(rows.shape[0])[:, None], columns[None]))
    return plgpu.load(ref.at[at], mask=rows[:, None] & (columns < ref.shape[-1])[None], other=0)


def _block(ref, start, n: int, piece: tuple[int, int]):
    """Where a block lies. Slices that are known to leave the array are refused: lists of indices are not."""
    c, w = piece
    if c + w <= ref.shape[1] and not (isinstance(start, int) and start + n > ref.shape[0]):
        return ref.at[pl.ds(start, n), pl.ds(c, w)]
    rows, cols = (start + jnp.arange(n))[:, None], (c + jnp.arange(w))[None]
    return ref.at[jnp.broadcast_to(rows, (n, w)), jnp.broadcast_to(cols, (n, w))]


def _inside(rows, piece: tuple[int, int], width: int):
    mask = rows[:, None]
    if sum(piece) > width:
        mask = mask & (piece[0] + jnp.arange(piece[1]) < width)[None]
    return mask


def visible_slots(at, inside, begin, end, owner_ref, number, axis: int = 1):
    """Which of n slots from `at` on each query row sees, bool `[rows, n]`: of its range, those that head `number` owns.

    Args:
        inside: bool `[n]`, which slots are there.
        begin, end: `[rows]`, of `load_ranges`.
        owner_ref: int8 `[S]`, or None where all slots are the head's.
        axis: of the slots; 0 for `[n, rows]`, as in `online_softmax`.
    """
    slots, rows = (functools.partial(jnp.expand_dims, axis=i) for i in (1 - axis, axis))
    where = at + jnp.arange(inside.shape[0])
    visible = (slots(where) >= rows(begin)) & (slots(where) < rows(end))
    if owner_ref is None:
        return visible
    owner = plgpu.load(owner_ref.at[pl.ds(at, inside.shape[0])], mask=inside, other=-1)
    return visible & slots(owner.astype(jnp.int32) == number)


def online_softmax(logits, visible, top, total, axis: int = 1, dtype=jnp.float32):
    """One tile into the running maximum and sum (base 2): weights, and the factor that shrinks what is there.

    Args:
        axis: of the tile's slots.
        dtype: of the weights; what is summed are those that are rounded to it.
    """
    logits = jnp.where(visible, logits, EMPTY)
    new_top = jnp.maximum(top, jnp.max(logits, axis=axis))
    weights = jnp.where(visible, jnp.exp2(logits - jnp.expand_dims(new_top, axis)), 0.0).astype(dtype)
    shrink = jnp.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + jnp.sum(weights.astype(jnp.float32), axis=axis)


def logits_of(queries, keys, tile: int):
    """Float32 `[rows, tile]` of queries and a tile's keys, both piece by piece of their columns."""
    logits = jnp.zeros((queries[0].shape[0], tile), jnp.float32)
    for q, own in zip(queries, keys, strict=True):
        logits += dot(q, own.astype(q.dtype).T)
    return logits


def add_tile(carry, logits, scale: float, visible, dtype, pieces, values, value_scale=None, token_scale=None):
    """One tile into the running maximum, sum and outputs.

    Args:
        logits: not scaled yet.
        dtype: of weights and values that are multiplied.
        pieces: of the values' columns, in which `values` come.
        value_scale: gives what a piece's sums are multiplied by, or None.
        token_scale: what each token's values are multiplied by, float32 `[tile]`, or None.
    """
    top, total, accs = carry
    weights, shrink, top, total = online_softmax(logits * (scale * LOG2_E), visible, top, total)
    weights = weights if token_scale is None else weights * token_scale[None]
    out = []
    for acc, piece, own in zip(accs, pieces, values, strict=True):
        added = dot(weights.astype(dtype), own.astype(dtype))
        out.append(acc * shrink[:, None] + (added if value_scale is None else added * value_scale(piece)))
    return top, total, tuple(out)


def dot(a, b):
    """Product in float32; operands in float32 are multiplied as such, not as TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def write_partial(out_ref, lse_ref, grid: Grid, accs, pieces, top, total) -> None:
    """Store a split's partial; rows that saw nothing get (0, `empty_of` the splits)."""
    rows = grid.rows
    row = jnp.arange(rows)
    inside = row < lse_ref.shape[0]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, empty_of(grid.splits), top / LOG2_E + jnp.log(total))
    plgpu.store(lse_ref.at[row], lse, mask=inside)
    for acc, piece in zip(accs, pieces, strict=True):
        at = _block(out_ref, 0, rows, piece)
        plgpu.store(at, acc / total[:, None], mask=_inside(inside, piece, out_ref.shape[-1]))


def start_carry(rows: int, pieces):
    """Running maximum, sum and outputs of no tokens."""
    top, total = jnp.full((rows,), EMPTY, jnp.float32), jnp.zeros((rows,), jnp.float32)
    return top, total, tuple(jnp.zeros((rows, w), jnp.float32) for _, w in pieces)


def start_beside(others: Sequence[Others], grid: Grid, scale: float, columns, there: int, behind: bool = False):
    """The same of this split's share of `Others`.

    Args:
        columns: of each output, which channels it has, int32 `[w]`.
        there: query rows.
        behind: whether they are rows of `EightBits`.
    """
    carry = start_carry(grid.rows, [(0, own.shape[0]) for own in columns])
    for own in others:
        carry = _add_others(carry, own, grid, scale, columns, there, behind)
    return carry


def _add_others(carry, others: Others, grid: Grid, scale: float, columns, there: int, behind: bool):
    pieces = packing.columns(others.q.shape[-1])
    row = jnp.arange(grid.rows) < there
    queries = [load_block(others.q, 0, row, piece) for piece in pieces]
    begin, end = load_ranges(others, grid.rows, there)
    low, high = span(others)
    size = _tile_of(others, grid)

    def body(tile, carry):
        at = tile * size
        inside = at + jnp.arange(size) < high
        if behind:
            keys = _widened(others.keys, at, inside, [first + jnp.arange(width) for first, width in pieces])
            values = _widened(others.values, at, inside, columns)
        else:
            keys = (load_block(others.keys, at, inside, piece) for piece in pieces)
            values = (load_columns(others.values, at, inside, own) for own in columns)
        visible = visible_slots(at, inside, begin, end, None, None)
        return add_tile(carry, logits_of(queries, keys, size), scale, visible, others.q.dtype, columns, values)

    first = low // size
    start, stop = split_range(pl.cdiv(high, size) - first, grid)
    return jax.lax.fori_loop(first + start, first + stop, body, carry)


def _widened(ref, at, inside, columns):
    """Some channels of tokens from `at` on, float32 `[n, w]` each, of rows of `EightBits`."""
    scale = scale_behind(ref, ref.shape[-1] - SCALE, at, inside)
    for own in columns:
        codes = load_columns(ref, at, inside, jnp.minimum(own, ref.shape[-1] - 1)).astype(jnp.int32)
        yield (codes - 2 * (codes & 128)).astype(jnp.float32) * scale


def scale_behind(ref, width: int, at, inside):
    """Float32 `[n, 1]`, the scales of tokens whose codes in 8 bits are `width` bytes."""
    low, high = (load_block(ref, at, inside, (width + i, 1)).astype(jnp.uint32) for i in range(SCALE))
    return jax.lax.bitcast_convert_type((high << 24) | (low << 16), jnp.float32)


def _tile_of(others: Others, grid: Grid) -> int:
    """As many of them at once as the stages of a pipeline over the others have room for."""
    size, each = grid.tile, sum(x.shape[-1] * x.dtype.itemsize for x in (others.keys, others.values))
    while size > LEAST_TILE and (grid.stages - 1) * size * each > BESIDE_BYTES:
        size //= 2
    return size
