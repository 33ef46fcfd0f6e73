"""Rotation angles for kernels. Computed as float32 position times frequency they err by 1e-2 radians at 100K tokens.

Of one position, by the addition theorem: it is written in base `DIGIT`, and R(p) = R(high) R(middle) R(low), products of
entries of small tables from float64. Of many that follow no order, in fractions of a turn (`turns`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import power_of_two
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import steps_of

DIGIT = 128
DIGITS = 3  # positions up to 2 ** 21


class Pairs(NamedTuple):
    """Channels of a head as pairs that are rotated together.

    Attributes:
        first, second: channel of each pair, `[half]`.
        frequency: float64 `[half]`, radians a position; zero for channels beyond `rotary_dim`.
        padded: half, rounded up to a power of two.
    """

    first: np.ndarray
    second: np.ndarray
    frequency: np.ndarray
    padded: int

    @property
    def lie_in_order(self) -> bool:
        """Whether the first channels of all pairs lie before the second ones, without a gap."""
        return np.array_equal([*self.first, *self.second], np.arange(2 * self.padded))


@functools.lru_cache
def channel_pairs(rope: RopeSpec | None, head_dim: int) -> Pairs:
    """The pairs of RoPE, and of the channels that it leaves alone two and two.

    Raises:
        Unsupported: an odd number of those.
    """
    half = 0 if rope is None else rope.rotary_dim // 2
    rest = np.arange(2 * half, head_dim)
    if rest.size % 2:
        raise Unsupported(f"{rest.size} channels without rotation, an odd number")
    first = np.concatenate([np.arange(half), rest[: rest.size // 2]])
    second = np.concatenate([np.arange(half, 2 * half), rest[rest.size // 2 :]])
    rotated = np.zeros(0) if rope is None else rope.inverse_frequencies()
    return Pairs(first, second, np.concatenate([rotated, np.zeros(rest.size // 2)]), power_of_two(first.size, 16))


@functools.lru_cache
def digit_tables(rope: RopeSpec | None, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every digit's angle, each float32 `[DIGITS, DIGIT, padded]`; the first is the table of a tile."""
    pairs = channel_pairs(rope, head_dim)
    weights = np.array([DIGIT**level for level in range(DIGITS)])
    turns = weights[:, None, None] * np.arange(DIGIT)[:, None] * pairs.frequency
    turns = np.pad(turns, ((0, 0), (0, 0), (0, pairs.padded - pairs.first.size)))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def split_pairs(x: jax.Array, pairs: Pairs) -> jax.Array:
    """Channels `[.., D]` as pairs `[.., 2, padded]`, padded with zeros."""
    if pairs.lie_in_order:
        return x.reshape(*x.shape[:-1], 2, -1)  # as they lie: gathered, they would be copied
    x = jnp.stack([x[..., pairs.first], x[..., pairs.second]], axis=-2)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pairs.padded - pairs.first.size)])


def turn(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of channel pairs rotated by an angle."""
    return first * cos - second * sin, second * cos + first * sin


def position_angle(cos_ref, sin_ref, position):
    """cos and sin `[1, padded]` of a scalar position, inside of a kernel, from refs of `digit_tables`."""
    digits = [(position // DIGIT**level) % DIGIT for level in range(DIGITS)]
    (cos, sin), *others = [
        tuple(table[level, pl.ds(digit, 1), :] for table in (cos_ref, sin_ref)) for level, digit in enumerate(digits)
    ]
    for other in others:
        cos, sin = turn(cos, sin, *other)
    return cos, sin


@functools.lru_cache
def steps_of_pairs(rope: RopeSpec | None, head_dim: int) -> np.ndarray:
    """What every pair turns by from one position to the next, int32 `[2, padded]`; see `steps_of`."""
    pairs = channel_pairs(rope, head_dim)
    return steps_of(np.pad(pairs.frequency, (0, pairs.padded - pairs.first.size)))
