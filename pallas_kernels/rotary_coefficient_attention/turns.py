"""Rotation angles of positions that follow no order, in fractions of a turn.

Integers wrap as angles do, so that position times step errs by its last bit alone, and a short series gives cos and sin
of what is left: no table, and no sine, which takes XLA on a CPU ten times as long.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

TURN = 32  # bits of a fraction of a turn
BEHIND = 11  # and of a step behind them: times a position of at most 2 ** 21 they fit as many bits
TERMS = 7  # of the series, up to a quarter of a turn: the next one of the sine is 7e-10, of the cosine 6e-9


def steps_of(frequency: np.ndarray) -> np.ndarray:
    """Frequencies float64 `[pairs]`, radians a position, as int32 `[2, pairs]`: the first `TURN` bits of the fraction of
    a turn, and the `BEHIND` bits behind them."""
    bits = np.round(frequency / (2 * math.pi) * 2.0 ** (TURN + BEHIND)).astype(np.int64) % 2 ** (TURN + BEHIND)
    return np.stack([(bits >> BEHIND).astype(np.uint32).view(np.int32), bits % 2**BEHIND]).astype(np.int32)


def slot_angles(position: jax.Array, step: jax.Array, behind: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of int32 positions, float32 within 1e-6 up to position 2 ** 21, finite whatever the position.

    Args:
        position: `[..., tokens, 1]`, or `[..., 1, tokens]`.
        step, behind: of `steps_of`, int32 `[1, pairs]`, or `[pairs, 1]`.
    """
    position = position.astype(jnp.int32)  # which wraps, also where integers have 64 bits
    phase = position * step + jax.lax.shift_right_logical(position * behind, jnp.int32(BEHIND))
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
