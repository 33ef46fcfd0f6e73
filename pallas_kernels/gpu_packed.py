"""Packed codes of several widths in Triton kernels: pieces of a token's bytes, each unpacked in registers."""

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

PIECE = 64  # columns that are unpacked and multiplied at once: of fewer, programs wait; more fill the registers


class Pieces(NamedTuple):
    """A run's bytes in pieces, each of which unpacks to `PIECE` columns; those behind the run meet zeros.

    Attributes:
        byte: the first one, counted from where the token begins.
        count: of pieces.
        bits: of a component.
        column: where their components begin in the kernel's order: piece by piece, in it first the lowest bits of bytes.
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
    def bytes(self) -> int:
        """Of a piece."""
        return PIECE // self.each

    def columns(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the columns of each product."""
        return tuple((self.column + i * PIECE, PIECE) for i in range(self.count))


@functools.lru_cache
def pieces_of_runs(runs: WidthRuns) -> tuple[Pieces, ...]:
    """All bytes of a token, in order."""
    found, at, column = [], 0, 0
    for bits, count in runs:
        length = bytes_of(((bits, count),))
        found.append(Pieces(at, -(-length * (8 // bits) // PIECE), bits, column))
        at, column = at + length, column + found[-1].count * PIECE
    return tuple(found)


@functools.lru_cache
def piece_order(runs: WidthRuns) -> Order:
    """The component of each column of `pieces_of_runs`."""
    component, scale = [], []
    for pieces in pieces_of_runs(runs):
        for number in range(pieces.count):
            byte = pieces.byte + number * pieces.bytes + np.arange(pieces.bytes)
            for i in range(pieces.each):
                component += component_of(runs, byte, i, pieces.bits).tolist()
                scale += [2.0 ** -(i * pieces.bits)] * pieces.bytes
    return Order(tuple(component), tuple(scale))


def columns_of(stored: Stored) -> int:
    """Columns in which a kernel has a token's numbers: R of an array."""
    return stored.codes.shape[-1] if stored.runs is None else len(piece_order(stored.runs).component)


def pieces_of(width: int, runs: WidthRuns | None) -> tuple[tuple[int, int], ...]:
    """(start, size) of the pieces in which a kernel has the numbers of tokens, packed ones or arrays `[.., width]`."""
    if runs is None:
        return columns(width)
    return tuple(piece for pieces in pieces_of_runs(runs) for piece in pieces.columns())


def spread_for(stored: Stored, x: jax.Array) -> jax.Array:
    """What multiplies the stored components `[.., R]`, as a kernel takes it."""
    return x if stored.runs is None else spread(x, piece_order(stored.runs))


def with_rows(x: jax.Array, rows: int) -> jax.Array:
    """Queries `[.., M, R]` with zeros behind, `[.., rows, R]`: where columns come in a loop, rows have no mask."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, 0)])


def collected_from(stored: Stored, x: jax.Array) -> jax.Array:
    """Sums of the stored components `[.., R]` of what a kernel gives."""
    return x if stored.runs is None else collected(x, piece_order(stored.runs), stored.runs)


def check_packed(rows: int, most: int, *packed: Stored) -> None:
    """Raise `Unsupported` for more query rows than are covered, or packed tokens of more columns than `most`."""
    if rows > PACKED_ROWS:
        raise Unsupported(f"more than {PACKED_ROWS} query rows (queries x query heads) a kv head over packed tokens")
    for own in packed:
        if columns_of(own) > most:
            raise Unsupported(f"packed tokens that unpack to {columns_of(own)} columns: beyond {most} registers overflow")


def unpacked(ref, start, rows, runs: WidthRuns) -> Iterator[jax.Array]:
    """Numbers of n packed tokens `[n, PIECE]` float32, for each of the `pieces_of` them.

    Args:
        ref: `[S, C]`.
        start, rows: first token, and which of the n are there.
    """
    for pieces in pieces_of_runs(runs):
        for number in range(pieces.count):
            yield _unpacked(_load(ref, start, rows, pieces, number), pieces)


def over_columns(ref, start, rows, runs: WidthRuns, step: Callable[[Any, jax.Array, Any], Any], carry: Any) -> Any:
    """As `unpacked`, in loops: `carry = step(carry, numbers, columns)` for each piece and the slice of its columns.

    What `step` loads does not wait in registers from tile to tile, nor what is unpacked from piece to piece.
    """
    for pieces in pieces_of_runs(runs):

        def piece(number, carry, pieces=pieces):
            where = pl.ds(pieces.column + number * PIECE, PIECE)
            return step(carry, _unpacked(_load(ref, start, rows, pieces, number), pieces), where)

        carry = piece(0, carry) if pieces.count == 1 else jax.lax.fori_loop(0, pieces.count, piece, carry)
    return carry


def _unpacked(codes: jax.Array, pieces: Pieces) -> jax.Array:
    """Float32 `[n, PIECE]` of bytes `[n, PIECE / each]`: all lowest components, then all next ones, .."""
    masks = jnp.left_shift((1 << pieces.bits) - 1, pieces.bits * jnp.arange(pieces.each, dtype=jnp.int32))
    return middles(codes[:, None, :], masks[None, :, None]).reshape(codes.shape[0], PIECE)


def _load(ref, start, rows, pieces: Pieces, number) -> jax.Array:
    """A piece's bytes of n tokens as int32 `[n, bytes]`; zeros where not `rows`, and beyond the token."""
    first, width, tokens, mask = pieces.byte + number * pieces.bytes, pieces.bytes, rows.shape[0], rows[:, None]
    if pieces.byte + pieces.count * width <= ref.shape[1]:
        where = ref.at[pl.ds(start, tokens), pl.ds(first, width)]
    else:  # a slice that is known to leave the array is refused
        at = (start + jnp.arange(tokens))[:, None], (first + jnp.arange(width))[None]
        where, mask = ref.at[tuple(jnp.broadcast_to(x, (tokens, width)) for x in at)], mask & (at[1] < ref.shape[1])
    return plgpu.load(where, mask=mask, other=0).astype(jnp.int32)
