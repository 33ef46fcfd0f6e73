"""Packed codes of several widths as kernels read them: bytes of a token, and in each byte components side by side.

A kernel unpacks byte by byte, so that components come in an order of its own. What multiplies them (queries, a basis) is
spread to that order before it starts, with zeros where a byte holds nothing, and what they sum up to is collected from
it: both by stretches, which XLA slices.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.storage.water_filled import WidthRuns, bytes_of, components_of

NOTHING = -1  # in an order: a column without a component


class Order(NamedTuple):
    """Columns of a kernel.

    Attributes:
        component: of every column, or `NOTHING`.
        scale: what its number is multiplied by, as `middles` gives it.
    """

    component: tuple[int, ...]
    scale: tuple[float, ...]


def component_of(runs: WidthRuns, byte: np.ndarray, number: int, bits: int | None = None) -> np.ndarray:
    """Component `number` of each byte of a token, or `NOTHING`.

    Args:
        byte: int `[n]`, counted from where the token begins.
        number: 0 for the lowest bits.
        bits: of the only run that counts; by default they all do.
    """
    found, at, begin = np.full(len(byte), NOTHING), 0, 0
    for width, count in runs:
        length = bytes_of(((width, count),))
        place = number * length + byte - at
        inside = (byte >= at) & (byte < at + length) & (place < count) & (bits in (None, width)) & (number < 8 // width)
        found, at, begin = np.where(inside, begin + place, found), at + length, begin + count
    return found


def spread(x: jax.Array, order: Order) -> jax.Array:
    """Numbers `[.., R]` of the components in a kernel's order `[.., columns]`, zeros where it has none."""
    parts = [
        x[..., first : last + 1] if first >= 0 else jnp.zeros((*x.shape[:-1], size), x.dtype)
        for first, last, size in _stretches(order.component)
    ]
    return jnp.concatenate(parts, axis=-1) * jnp.asarray(order.scale, x.dtype)


def collected(x: jax.Array, order: Order, runs: WidthRuns) -> jax.Array:
    """Numbers `[.., R]` of the components from those in a kernel's order `[.., columns]`."""
    where, places = np.zeros(components_of(runs), int), np.asarray(order.component)
    where[places[places >= 0]] = np.flatnonzero(places >= 0)
    x = x * jnp.asarray(order.scale, x.dtype)
    return jnp.concatenate([x[..., first : last + 1] for first, last, _ in _stretches(tuple(where))], axis=-1)


def _stretches(order: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """First, last and length of what rises by one, or is `NOTHING`, from number to number."""
    places = np.asarray(order)
    rises = (np.diff(places) == 1) & (places[:-1] >= 0)
    nothing = (places[:-1] < 0) & (places[1:] < 0)
    for part in np.split(places, np.flatnonzero(~(rises | nothing)) + 1):
        yield int(part[0]), int(part[-1]), len(part)


def middles(codes: jax.Array, mask: Any) -> jax.Array:
    """What components read as, the middles of their steps, times two to the place of their lowest bit: float32.

    That factor is exact and belongs to what multiplies them (`Order.scale`): nothing need be shifted.

    Args:
        codes: bytes as int32.
        mask: the bits of a component; an int, or int32 that broadcasts to `codes`.
    """
    half = 0.5 * mask if isinstance(mask, int) else 0.5 * mask.astype(jnp.float32)
    return (codes & mask).astype(jnp.float32) - half
