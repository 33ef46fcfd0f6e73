"""Packed codes of several widths in TPU kernels: all bytes of a tile at once, one component of each after the other."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.pallas_kernels.packed_codes import Order, component_of, middles
from lowrank_kv_jax.storage.water_filled import WidthRuns, bytes_of

SUBLANES = 32  # bytes of a register's column: rows that are sliced begin at a multiple of it
LANES = 128  # columns of the kernel's order do


class Plane(NamedTuple):
    """Component number `number` of the bytes of a token that have so many, from a whole register on.

    Attributes:
        number: 0 for the lowest bits.
        row: the first byte.
        rows: how many; those of wider runs before are met by zeros.
        column: where its components begin in the kernel's order.
    """

    number: int
    row: int
    rows: int
    column: int

    @property
    def columns(self) -> slice:
        return slice(self.column, self.column + self.rows)


@functools.lru_cache
def planes_of(runs: WidthRuns) -> tuple[Plane, ...]:
    """The planes of a token, the lowest bits first."""
    planes, column, size = [], 0, bytes_of(runs)
    for number in range(8 // runs[-1][0]):
        row = bytes_of(tuple(run for run in runs if 8 // run[0] <= number)) // SUBLANES * SUBLANES
        planes.append(Plane(number, row, size - row, column))
        column += -(-(size - row) // LANES) * LANES
    return tuple(planes)


@functools.lru_cache
def plane_order(runs: WidthRuns) -> Order:
    """The component of each column of `planes_of`."""
    component, scale = [], []
    for plane in planes_of(runs):
        columns = -(-plane.rows // LANES) * LANES
        byte = plane.row + np.arange(columns)
        component += component_of(runs, byte, plane.number).tolist()
        scale += [2.0 ** -(plane.number * bits) for bits in _bits(runs, byte).tolist()]
    return Order(tuple(component), tuple(scale))


def _bits(runs: WidthRuns, byte: np.ndarray) -> np.ndarray:
    """Of the components of each byte; of those behind the last run as it has."""
    ends = np.cumsum([bytes_of((run,)) for run in runs])
    return np.array([bits for bits, _ in runs])[np.minimum(np.searchsorted(ends, byte, side="right"), len(runs) - 1)]


def unpacked(ref, runs: WidthRuns, dtype) -> Iterator[tuple[Plane, jax.Array]]:
    """Planes and their numbers `[rows, tokens]` of a tile `[C, tokens]`."""
    for plane in planes_of(runs):
        codes = ref[plane.row : plane.row + plane.rows, :].astype(jnp.int32)
        yield plane, middles(codes, _mask(runs, plane)).astype(dtype)


def _mask(runs: WidthRuns, plane: Plane):
    """The bits of a plane's component in each of its bytes, an int or int32 `[rows, 1]`."""
    byte = plane.row + jax.lax.broadcasted_iota(jnp.int32, (plane.rows, 1), 0)
    ends = np.cumsum([bytes_of((run,)) for run in runs]).tolist()
    mask = None
    for end, (bits, _) in sorted(zip(ends, runs, strict=True), reverse=True):
        own = (((1 << bits) - 1) << plane.number * bits) & 255  # nothing where bytes have fewer components
        if end > plane.row:
            mask = own if mask is None else jnp.where(byte < end, own, mask)
    return mask
