"""Decode attention over packed codes of several widths for GPUs: a Pallas kernel in its Triton dialect.

As the kernel of `gpu_triton`, whose programs and splits it has, but turned around: tokens are the rows of the first
product and bytes those of the second, so that bytes are the operand that is held in registers, and as few as eight query
rows are a whole one. A program is one warp where its sums fit: nothing waits for another, and no byte is unpacked twice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, packed_grid, packed_heads
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, launch
from lowrank_kv_jax.pallas_kernels.gpu_packed import (
    SUBNORMAL,
    WINDOW,
    columns_of,
    power_above,
    products,
    read_of,
    spread_queries,
    windows_of,
)
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import packed_grid_there
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    load_ranges,
    online_softmax,
    start_carry,
    tile_range,
    visible_slots,
)
from lowrank_kv_jax.pallas_kernels.owned_slots import numbers as numbers_of_heads
from lowrank_kv_jax.pallas_kernels.packing import LOG2_E, Stored, by_program, by_query, empty_of, pack
from lowrank_kv_jax.storage.water_filled import WORD, WidthRuns, components_of


class Folded(NamedTuple):
    """Queries as they meet codes, of n stretches of tokens each their own.

    Attributes:
        numbers: float16 `[J, B, n, T, N / J, columns]` of J heads, as the product lies that they come of; columns in the
            order that windows of so many bytes have.
        window: bytes.
        largest: float32 `[B, T, N]`: numbers are over the `power_above` of this.
        above: float32 `[B, n, T, N]`, what is taken off the products, because codes count from 0 and keys from their
            middles.
        tokens: of a stretch, a multiple of what a program reads at once; None: all.
        added: float32 `[B, T, N, n * tokens]`, what is added to each slot's, or None.
    """

    numbers: jax.Array
    window: int
    largest: jax.Array
    above: jax.Array
    tokens: int | None = None
    added: jax.Array | None = None


def attend_slots(
    q, keys: Stored, values: Stored, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None
) -> AttnPartial:
    """As `gpu_triton.attend_slots`."""
    check(q, keys, values)
    numbers, largest, above = spread_queries(q, keys.runs)
    folded = Folded(numbers[None, :, None], WINDOW, largest, above[:, None])
    return attend_folded(
        folded, keys, values, begin, end, scale=scale, size=size, interpret=interpret, owner=owner
    )


def attend_folded(
    folded: Folded, keys: Stored, values: Stored, begin, end, *, scale: float, size: int, interpret: bool,
    owner: jax.Array | None = None,
) -> AttnPartial:
    """The same of queries that are folded, and after `check`."""
    stored = max(keys.codes.shape[1], values.codes.shape[1])

    def columns(warps: int) -> int:
        return columns_of(values.runs, warps * WINDOW)

    def token_bytes(warps: int) -> int:
        return read_of(keys.runs, folded.window) + read_of(values.runs, warps * WINDOW)

    batch, queries, q_heads = folded.largest.shape
    more = folded.added is not None
    heads = packed_heads(stored, q_heads, queries, columns, more, folded.numbers.shape[0])
    packed = pack(folded.largest[..., None], heads, begin, end)
    rows = packed.q.shape[2]
    grid = packed_grid(rows, batch * heads, size, columns, token_bytes, more)
    held = 0 if folded.tokens is None else grid.rows * folded.numbers.shape[-1] * folded.numbers.dtype.itemsize
    grid = packed_grid_there(grid, keys, values, token_bytes(grid.warps), held)
    above = by_program(folded.above[..., None], heads)[..., 0]
    added = by_program(folded.added[:, None], heads)[:, :, 0] if more else None
    told = [] if owner is None else [numbers_of_heads(batch, owner)]
    kernel = functools.partial(
        _kernel, grid=grid, owned=owner is not None, key_runs=keys.runs, value_runs=values.runs, interpret=interpret,
        window=folded.window, stretch=folded.tokens, added=more, scale=scale,
    )
    operands = [
        *by_head(packed, owner), (folded.numbers, _query_spec(folded.numbers, heads)),
        *by_head(packed, packed.q[..., 0], above, added, keys.codes, values.codes),
    ]
    width = components_of(values.runs)
    part = launch(
        "coefficient_attention", kernel, grid, packed, told, operands, width, interpret=interpret,
        reads_lse=folded.tokens is not None)
    return by_query(part, queries)


def attend_given(
    logits: jax.Array, values: Stored, begin, end, *, scale: float, interpret: bool
) -> AttnPartial:
    """As `gpu_triton.attend_given`, with weights in float16."""
    batch, queries, q_heads, parts, _ = logits.shape

    def columns(warps: int) -> int:
        return columns_of(values.runs, warps * WINDOW)

    def token_bytes(warps: int) -> int:
        return read_of(values.runs, warps * WINDOW)

    heads = packed_heads(values.codes.shape[1], q_heads, queries, columns, added=True)
    packed = pack(logits.reshape(batch, queries, q_heads, -1), heads, begin, end)
    rows, size = packed.q.shape[2], values.codes.shape[2]
    grid = packed_grid(rows, batch * heads, size, columns, token_bytes, added=True, given=True)
    grid = packed_grid_there(grid, values, values, token_bytes(grid.warps))
    kernel = functools.partial(
        _given_kernel, grid=grid, runs=values.runs, interpret=interpret, scale=scale, parts=parts)
    operands, width = by_head(packed, packed.q, values.codes), components_of(values.runs)
    part = launch(
        "coefficient_attention", kernel, grid, packed, [], operands, width, interpret=interpret, reads_lse=True)
    return by_query(part, queries)


def _query_spec(x: jax.Array, heads: int) -> pl.BlockSpec:
    """What each program has of `numbers`: of some of their J heads all queries, or of one a part."""
    together, parts = max(1, x.shape[0] // heads), max(1, heads // x.shape[0])
    block = together, None, *x.shape[2:4], x.shape[4] // parts, x.shape[5]
    return pl.BlockSpec(block, lambda s, h, b: (h // parts, b, 0, 0, h % parts, 0))


def check(q, keys: Stored, values: Stored) -> None:
    """Raise `Unsupported` for what the kernel does not read."""
    if (keys.runs is None) != (values.runs is None):
        raise Unsupported("keys and values packed in several widths, or both not")
    if q.dtype.itemsize != 2:
        raise Unsupported(f"queries of dtype {q.dtype.name} over packed tokens")
    for name, side in (("keys", keys), ("values", values)):  # byte by byte an H200 takes 60 times as long
        if side.codes.shape[-1] % WORD:
            raise Unsupported(f"{name} packed in {side.codes.shape[-1]} bytes a token, no whole words of {WORD}")


def _kernel(
    limits, *refs, grid: Grid, owned: bool, key_runs, value_runs, interpret: bool, window: int,
    stretch: int | None, added: bool, scale: float,
):
    (owner_ref, *refs) = refs if owned else (None, *refs)
    q_ref, largest_ref, above_ref, *refs = refs
    (added_ref, *refs) = refs if added else (None, *refs)
    k_ref, v_ref, out_ref, lse_ref = refs
    rows, n = jnp.arange(grid.rows), grid.tile
    largest = plgpu.load(largest_ref.at[rows], mask=rows < largest_ref.shape[0], other=0)
    factor = scale * LOG2_E * SUBNORMAL * power_above(largest)
    queries_at = _queries_at(q_ref, grid.rows)

    def logits_of(tile, at):
        number = jnp.int32(0) if stretch is None else tile * n // stretch  # of the queries that this tile's tokens meet
        logits = jnp.zeros((n, grid.rows), jnp.float32)
        for product, keys in products(k_ref, at, n, windows_of(key_runs, window), interpret):
            q = plgpu.load(q_ref.at[queries_at(number, product.column, window)])
            logits += jnp.dot(keys, q.T, preferred_element_type=jnp.float32)
        above = plgpu.load(above_ref.at[number, rows], mask=rows < above_ref.shape[1], other=0)
        logits = logits * factor[None] - (scale * LOG2_E * above)[None]
        return logits + scale * LOG2_E * _of_slots(added_ref, at, n, grid.rows) if added else logits

    _over_tiles(limits, logits_of, owner_ref, v_ref, out_ref, lse_ref, grid=grid, runs=value_runs, interpret=interpret)


def _given_kernel(
    limits, logits_ref, v_ref, out_ref, lse_ref, *, grid: Grid, runs, interpret: bool, scale: float, parts: int
):
    each = logits_ref.shape[1] // parts

    def logits_of(tile, at):
        return scale * LOG2_E * sum(_of_slots(logits_ref, at + n * each, grid.tile, grid.rows) for n in range(parts))

    _over_tiles(limits, logits_of, None, v_ref, out_ref, lse_ref, grid=grid, runs=runs, interpret=interpret)


def _over_tiles(
    limits, logits_of, owner_ref, v_ref, out_ref, lse_ref, *, grid: Grid, runs: WidthRuns, interpret: bool
) -> None:
    """Sum up this program's share of the values.

    Args:
        logits_of: gives those of a tile, by its number and its first slot, float32 `[tile, rows]`, in base 2.
    """
    begin, end = load_ranges(limits, grid.rows, lse_ref.shape[0])
    start, stop, high = tile_range(limits, grid)
    windows = windows_of(runs, grid.warps * WINDOW)
    size, n = v_ref.shape[0], grid.tile

    def body(tile, carry):
        top, total, accs = carry
        # a mask of tokens would spill registers: the last tile begins where all of it is there, if it is anywhere
        at = tile * n if size % n == 0 else jnp.clip(size - n, 0, tile * n)
        inside = at + jnp.arange(n) < high
        logits = logits_of(tile, at)
        seen = jnp.maximum(begin, tile * n), end  # of a tile that begins earlier, what no other has
        visible = visible_slots(at, inside, *seen, owner_ref, None if owner_ref is None else limits.told[0][0], axis=0)
        weights, shrink, top, total = online_softmax(logits, visible, top, total, 0, jnp.float16)
        accs = tuple(
            acc * shrink[None] + jnp.dot(values.T, weights, preferred_element_type=jnp.float32)
            for acc, (_, values) in zip(accs, products(v_ref, at, n, windows, interpret), strict=True)
        )
        return top, total, accs

    sums = tuple(jnp.zeros((own.size, grid.rows), jnp.float32) for own in windows for _ in own.products)
    top, total, sums = jax.lax.fori_loop(start, stop, body, (*start_carry(grid.rows, ())[:2], sums))
    _write(out_ref, lse_ref, grid, windows, sums, top, total)


def _queries_at(ref, rows: int):
    """Where columns `[rows, size]` of a stretch's queries are, of `ref` `[J, n, T, N, columns]`; rows that are not there
    are the last one's."""
    together, _, queries, each, _ = ref.shape
    row = jnp.minimum(jnp.arange(rows), together * queries * each - 1)[:, None]
    query, head = row // (together * each), row % (together * each)  # as `pack` orders them

    def at(number, column: int, size: int):
        columns = column + jnp.arange(size)[None]
        found = head // each, number, query, head % each, columns
        return tuple(jnp.broadcast_to(x, (rows, size)) for x in found)

    return at


def _of_slots(ref, at, tokens: int, rows: int):
    """Numbers `[tokens, rows]` of slots from `at` on, of `ref` `[M, S]`; zeros beyond M."""
    row, slot = jnp.arange(rows)[None], (at + jnp.arange(tokens))[:, None]
    row, slot = (jnp.broadcast_to(x, (tokens, rows)) for x in (row, slot))
    return plgpu.load(ref.at[row, slot], mask=row < ref.shape[0], other=0)


def _write(out_ref, lse_ref, grid: Grid, windows, sums, top, total) -> None:
    """A split's partial, component by component; rows that saw nothing get (0, `empty_of` the splits)."""
    row = jnp.arange(top.shape[0])
    there, empty = row < lse_ref.shape[0], total == 0
    total = jnp.where(empty, 1.0, total)
    plgpu.store(lse_ref.at[row], jnp.where(empty, empty_of(grid.splits), top / LOG2_E + jnp.log(total)), mask=there)
    for (size, product), own in zip([(w.size, x) for w in windows for x in w.products], sums, strict=True):
        byte = jnp.arange(size)
        mask = (byte >= product.first) & (byte < product.first + product.count)
        means = jnp.where(empty[None], 0.0, own * (product.scale / total)[None] - product.middle)
        at = [jnp.broadcast_to(x, own.shape) for x in (row[None], (product.component - product.first + byte)[:, None])]
        plgpu.store(out_ref.at[tuple(at)], means, mask=mask[:, None] & there[None])
