"""Rotation angles for kernels. Computed as float32 position times frequency they err by 1e-2 radians at 100K tokens.

Of one position, by the addition theorem: it is written in base `DIGIT`, and R(p) = R(high) R(middle) R(low), products of
entries of small tables from float64. Of many that follow no order, in fractions of a turn: integers wrap as angles do,
so that position times step errs by its last bit alone, and a short series gives cos and sin of what is left.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import power_of_two

DIGIT = 128
DIGITS = 3  # positions up to 2 ** 21
TURN = 32  # bits of a fraction of a turn
BEHIND = 11  # and of a step behind them: times a position of at most 2 ** 21 they fit as many bits
TERMS = 7  # of the series, up to a quarter of a turn: the next one of the sine is 7e-10, of the cosine 6e-9


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
    if np.array_equal([*pairs.first, *pairs.second], np.arange(2 * pairs.padded)):
        return x.reshape(*x.shape[:-1], 2, -1)  # as they lie: gathered, they would be copied
    x = jnp.stack([x[..., pairs.first], x[..., pairs.second]], axis=-2)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pairs.padded - pairs.first.size)])


def turn(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of channel pairs rotated by an angle."""
    return first * cos - second * sin, second * cos + first * sin


def position_angle(cos_ref, sin_ref, position, pairs=slice(None)):
    """cos and sin `[1, padded]` of a scalar position, or some `pairs` of them, inside of a kernel, from refs of
    `digit_tables`."""
    digits = [(position // DIGIT**level) % DIGIT for level in range(DIGITS)]
    (cos, sin), *others = [
        tuple(table[level, pl.ds(digit, 1), pairs] for table in (cos_ref, sin_ref)) for level, digit in enumerate(digits)
    ]
    for other in others:
        cos, sin = turn(cos, sin, *other)
    return cos, sin


@functools.lru_cache
def steps_of_pairs(rope: RopeSpec | None, head_dim: int) -> np.ndarray:
    """What every pair turns by from one position to the next, int32 `[2, padded]`: the first `TURN` bits of its fraction
    of a turn, and the `BEHIND` bits behind them."""
    pairs = channel_pairs(rope, head_dim)
    turns = np.pad(pairs.frequency / (2 * math.pi), (0, pairs.padded - pairs.first.size))
    bits = np.round(turns * 2.0 ** (TURN + BEHIND)).astype(np.int64) % 2 ** (TURN + BEHIND)
    return np.stack([(bits >> BEHIND).astype(np.uint32).view(np.int32), bits % 2**BEHIND]).astype(np.int32)


def slot_angles(position: jax.Array, step: jax.Array, behind: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of int32 positions, float32 within 1e-6 up to position 2 ** 21, finite whatever the position.

    Args:
        position: `[tokens, 1]`, or `[1, tokens]`.
        step, behind: of `steps_of_pairs`, int32 `[1, pairs]`, or `[pairs, 1]`.
    """
    phase = position * step + jax.lax.shift_right_logical(position * behind, BEHIND)
    # -1 where half a turn is nearer than none: the angle is counted from there, and both results change their sign
    opposite = (phase + (1 << TURN - 2)) >> TURN - 1
    angle = (phase - (opposite << TURN - 1)).astype(jnp.float32) * (2 * math.pi / 2**TURN)
    sign, square = (1 + 2 * opposite).astype(jnp.float32), angle * angle
    return sign * _series(square, 0), sign * angle * _series(square, 1)


def _series(square: jax.Array, first: int) -> jax.Array:
    """cos x of x squared, or with `first` 1 sin x / x."""
    factors = [(-1) ** i / math.factorial(2 * i + first) for i in range(TERMS)]
    total = jnp.full_like(square, factors[-1])
    for factor in factors[-2::-1]:
        total = total * square + factor
    return total
