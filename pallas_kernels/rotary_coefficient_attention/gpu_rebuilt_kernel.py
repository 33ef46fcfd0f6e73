"""Logits of keys that are rebuilt from coefficients before RoPE: the Triton kernel of `gpu_rebuilt`.

The basis lies in shared memory for all tiles of a program, beside which nothing is held but a tile's keys. Bytes are
numbers as `gpu_packed` says. As float16 numbers keys are rotated by their place within the tile, or each by its own
position where these follow no order, and meet the tile's queries.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid
from lowrank_kv_jax.pallas_kernels.gpu_packed import (
    WINDOW,
    WINDOWS,
    load_window,
    ones_like,
    products,
    products_of,
    windows_of,
)
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Limits, load_block, split_range
from lowrank_kv_jax.pallas_kernels.packing import columns
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rotation import (
    angles_of_slots,
    turned_halves,
    visits_of,
)
from lowrank_kv_jax.storage.water_filled import WidthRuns

PIECE = 64  # components of coefficients that are multiplied at once
SHARE = 16.0  # of what keys of codes are over, the part that logits are multiplied by; queries are by the rest

Factors = Callable[[Any], Iterator[tuple[jax.Array, list[jax.Array]]]]
"""Of a tile's first slot: what its keys are sums of, numbers `[tile, n]` and both sides of a basis `[n, pairs]`."""


def logits_kernel(
    begin_ref, end_ref, *refs, grid: Grid, gaps: int, key_runs: WidthRuns | None, angles: int, basis: int, by_slot: bool,
    interpret: bool,
) -> None:
    """Write the logits of this program's tiles, but for what queries are to be scaled by.

    Args:
        begin_ref, end_ref: as of `Limits`.
        refs: as many of `gaps_of`; of `angles`; queries `[V, 2, M, pairs]`; as many of a `basis`; tokens `[S, R]`;
            logits `[M, S']`.
        key_runs: of packed tokens.
        by_slot: the angles are those of each slot's position.
    """
    told, refs = refs[:gaps], refs[gaps:]
    q_ref, (k_ref, out_ref), basis_refs = refs[angles], refs[-2:], refs[angles + 1 : angles + 1 + basis]
    n, (_, _, there, pairs) = grid.tile, q_ref.shape
    factors = _floats(k_ref, n, *basis_refs, interpret=interpret) if key_runs is None else _codes(
        k_ref, key_runs, n, *basis_refs, interpret=interpret)
    rotate = angles_of_slots(*refs[:angles], n) if by_slot else _by_place(*refs[:angles], n) if angles else None
    row, size = jnp.arange(grid.rows), k_ref.shape[0]
    run_of, count = visits_of(Limits(begin_ref, end_ref, told, ()), n)

    def body(visit, carry):
        run = run_of(visit)
        first = run.tile * n
        at = first if size % n == 0 else jnp.clip(size - n, 0, first)  # a tile of which all is there, if it is anywhere
        slots = at + jnp.arange(n)
        mine = (slots >= jnp.maximum(run.low, first)) & (slots < run.high)
        keys = _rebuilt(factors(at), (n, pairs))
        if rotate is not None:
            keys = turned_halves(*keys, *(x.astype(jnp.float16) for x in rotate(at, mine)), interpret)
        met = visit if q_ref.shape[0] > 1 else 0
        queries = [plgpu.load(q_ref.at[_of_visit(met, side, row, there, pairs)]) for side in range(2)]
        logits = sum(jnp.dot(k, q.T, preferred_element_type=jnp.float32) for k, q in zip(keys, queries, strict=True))
        where = tuple(jnp.broadcast_to(x, (n, grid.rows)) for x in (row[None], slots[:, None]))
        logits = logits if key_runs is None else logits * SHARE
        plgpu.store(out_ref.at[where], logits, mask=mine[:, None] & (row < there)[None])
        return carry

    start, stop = split_range(count, grid)
    jax.lax.fori_loop(start, stop, body, jnp.int32(0))


def _rebuilt(factors: Iterator[tuple[jax.Array, list[jax.Array]]], shape: tuple[int, int]) -> list[jax.Array]:
    """Both channels of the pairs of a tile's keys, float16 `[tile, pairs]`."""
    halves = [jnp.zeros(shape, jnp.float32)] * 2
    for numbers, sides in factors:
        more = [jnp.dot(numbers, side, preferred_element_type=jnp.float32) for side in sides]
        halves = [x + y for x, y in zip(halves, more, strict=True)]
    return [x.astype(jnp.float16) for x in halves]


def _codes(k_ref, runs: WidthRuns, n: int, basis_ref, added_ref, *, interpret: bool) -> Factors:
    windows, first = windows_of(runs, *WINDOWS), windows_of(runs, WINDOW)[0]
    held = {product.column: _sides(basis_ref, product.column, product.size) for product in products_of(runs, *WINDOWS)}
    added = _sides(added_ref, 0, WINDOW)

    def factors(at):
        yield ones_like(load_window(k_ref, at, n, first), jnp.float16, interpret), added
        for product, numbers in products(k_ref, at, n, windows, interpret):
            yield numbers, held[product.column]

    return factors


def _sides(ref, column: int, size: int) -> list[jax.Array]:
    """Some columns of a basis `[2, columns, pairs]`."""
    return [plgpu.load(ref.at[jnp.int32(side), pl.ds(column, size), :]) for side in range(2)]


def _floats(k_ref, n: int, basis_ref, *added_ref, interpret: bool) -> Factors:
    pieces = columns(k_ref.shape[1], PIECE)
    held = [[_transposed(basis_ref, side, *piece) for side in range(2)] for piece in pieces]
    added = [_sides(ref, 0, WINDOW) for ref in added_ref]

    def factors(at):
        there = at + jnp.arange(n) < k_ref.shape[0]
        for sides in added:
            yield ones_like(load_block(k_ref, at, there, (0, WINDOW)), k_ref.dtype, interpret), sides
        for piece, sides in zip(pieces, held, strict=True):
            yield load_block(k_ref, at, there, piece), sides

    return factors


def _transposed(ref, side: int, start: int, size: int) -> jax.Array:
    """Some columns of a side of a basis `[2, pairs, R]`, `[size, pairs]`; zeros beyond R."""
    pairs, column = jnp.arange(ref.shape[1])[:, None], start + jnp.arange(size)[None]
    where = tuple(jnp.broadcast_to(x, (ref.shape[1], size)) for x in (jnp.int32(side), pairs, column))
    return plgpu.load(ref.at[where], mask=where[2] < ref.shape[2], other=0).T


def _of_visit(visit, side: int, row, there: int, pairs: int):
    """Where a visit's queries are, of `[V, 2, M, pairs]`; rows that are not there are the last one's."""
    found = visit, side, jnp.minimum(row, there - 1)[:, None], jnp.arange(pairs)[None]
    return tuple(jnp.broadcast_to(x, (row.shape[0], pairs)) for x in found)


def _by_place(cos_ref, sin_ref, tile: int):
    """Angles of places within a tile: the same for all."""
    angles = [plgpu.load(ref.at[pl.ds(0, tile), :]) for ref in (cos_ref, sin_ref)]
    return lambda at, mine: angles
