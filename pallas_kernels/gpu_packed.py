"""Packed codes of several widths in Triton kernels: blocks of bytes, each unpacked in registers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import PACKED_ROWS
from lowrank_kv_jax.pallas_kernels.packed_codes import Order, collected, component_of, middles, spread
from lowrank_kv_jax.pallas_kernels.packing import Stored, columns
from lowrank_kv_jax.storage.water_filled import WidthRuns, bytes_of

BLOCK = 32  # bytes: of more, what is unpacked fills the registers; of fewer, warps of a product would do the same work


class Blocks(NamedTuple):
    """The bytes of a run in blocks of `BLOCK`, which a kernel loads and unpacks in a loop; those behind it meet zeros.

    Attributes:
        byte: the first one, counted from where the token begins.
        count: of blocks.
        bits: of a component.
        column: where their components begin in the kernel's order: block by block, in it first the lowest bits of bytes.
    """

    byte: int
    count: int
    bits: int
    column: int

    @property
    def each(self) -> int:
        """Components of a byte."""
        return 8 // self.bits

    @property
    def mask(self) -> int:
        """The lowest component of a byte."""
        return (1 << self.bits) - 1

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the columns of each product."""
        return tuple((self.column + i * BLOCK, BLOCK) for i in range(self.count * self.each))


@functools.lru_cache
def blocks_of(runs: WidthRuns) -> tuple[Blocks, ...]:
    """All bytes of a token, in order."""
    found, at, column = [], 0, 0
    for bits, count in runs:
        length = bytes_of(((bits, count),))
        found.append(Blocks(at, -(-length // BLOCK), bits, column))
        at, column = at + length, column + found[-1].count * BLOCK * (8 // bits)
    return tuple(found)


@functools.lru_cache
def block_order(runs: WidthRuns) -> Order:
    """The component of each column of `blocks_of`."""
    component, scale = [], []
    for blocks in blocks_of(runs):
        for block in range(blocks.count):
            byte = blocks.byte + block * BLOCK + np.arange(BLOCK)
            for i in range(blocks.each):
                component += component_of(runs, byte, i, blocks.bits).tolist()
                scale += [2.0 ** -(i * blocks.bits)] * BLOCK
    return Order(tuple(component), tuple(scale))


def columns_of(stored: Stored) -> int:
    """Columns in which a kernel has a token's numbers: R of an array."""
    return stored.codes.shape[-1] if stored.runs is None else len(block_order(stored.runs).component)


def pieces_of(width: int, runs: WidthRuns | None) -> tuple[tuple[int, int], ...]:
    """(start, size) of the pieces in which a kernel has the numbers of tokens, packed ones or arrays `[.., width]`."""
    return columns(width) if runs is None else tuple(piece for blocks in blocks_of(runs) for piece in blocks.pieces())


def spread_for(stored: Stored, x: jax.Array) -> jax.Array:
    """What multiplies the stored components `[.., R]`, as a kernel takes it."""
    return x if stored.runs is None else spread(x, block_order(stored.runs))


def with_rows(x: jax.Array, rows: int) -> jax.Array:
    """Queries `[.., M, R]` with zeros behind, `[.., rows, R]`: where columns come in a loop, rows have no mask."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, 0)])


def collected_from(stored: Stored, x: jax.Array) -> jax.Array:
    """Sums of the stored components `[.., R]` of what a kernel gives."""
    return x if stored.runs is None else collected(x, block_order(stored.runs), stored.runs)


def check_packed(rows: int, most: int, *packed: Stored) -> None:
    """Raise `Unsupported` for more query rows than are covered, or packed tokens of more columns than `most`."""
    if rows > PACKED_ROWS:
        raise Unsupported(f"more than {PACKED_ROWS} query rows (queries x query heads) a kv head over packed tokens")
    for own in packed:
        if columns_of(own) > most:
            raise Unsupported(f"packed tokens that unpack to {columns_of(own)} columns: beyond {most} registers overflow")


def unpacked(ref, start, rows, runs: WidthRuns) -> Iterator[jax.Array]:
    """Numbers of n packed tokens `[n, BLOCK]` float32, for each of the `pieces_of` them.

    Args:
        ref: `[S, C]`.
        start, rows: first token, and which of the n are there.
    """
    for blocks in blocks_of(runs):
        for block in range(blocks.count):
            codes = _load(ref, start, rows, blocks, block)
            for i in range(blocks.each):
                yield middles(codes, blocks.mask << i * blocks.bits)


def over_columns(ref, start, rows, runs: WidthRuns, step: Callable[[Any, jax.Array, Any], Any], carry: Any) -> Any:
    """As `unpacked`, in loops: `carry = step(carry, numbers, columns)` for each piece and the slice of its columns.

    What `step` loads does not wait in registers from tile to tile, nor what is unpacked from piece to piece.
    """
    for blocks in blocks_of(runs):

        def block(number, carry, blocks=blocks):
            codes = _load(ref, start, rows, blocks, number)

            def piece(i, carry):
                where = pl.ds(blocks.column + (number * blocks.each + i) * BLOCK, BLOCK)
                return step(carry, middles(codes, jnp.left_shift(jnp.int32(blocks.mask), i * blocks.bits)), where)

            return _times(blocks.each, piece, carry)

        carry = _times(blocks.count, block, carry)
    return carry


def _times(count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    return body(0, carry) if count == 1 else jax.lax.fori_loop(0, count, body, carry)


def _load(ref, start, rows, blocks: Blocks, block) -> jax.Array:
    """A block's bytes of n tokens as int32 `[n, BLOCK]`; zeros where not `rows`, and beyond the token."""
    first, tokens, mask = blocks.byte + block * BLOCK, rows.shape[0], rows[:, None]
    if blocks.byte + blocks.count * BLOCK <= ref.shape[1]:
        where = ref.at[pl.ds(start, tokens), pl.ds(first, BLOCK)]
    else:  # a slice that is known to leave the array is refused
        at = (start + jnp.arange(tokens))[:, None], (first + jnp.arange(BLOCK))[None]
        where, mask = ref.at[tuple(jnp.broadcast_to(x, (tokens, BLOCK)) for x in at)], mask & (at[1] < ref.shape[1])
    return plgpu.load(where, mask=mask, other=0).astype(jnp.int32)
