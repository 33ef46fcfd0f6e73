"""A share of a number of tokens as an integer, exactly, for numbers that are traced too."""

from fractions import Fraction
from typing import TypeVar

import jax
import jax.numpy as jnp

MOST = 46_340  # the square of it is the last below 2^31

Count = TypeVar("Count", int, jax.Array)


def share_of(tokens: Count, share: float) -> Count:
    """floor(share * tokens) in integers, the share being the nearest fraction whose denominator is at most `MOST`.

    A traced product would be float32, whose integers end at 2^24 and whose 0.05 is not a twentieth.

    Args:
        tokens: a number, or int32 of any shape.
        share: in [0, 1].
    """
    p, q = _fraction(share)
    return tokens // q * p + tokens % q * p // q


def rounded_with_share(more: int, tokens: jax.Array, share: float) -> jax.Array:
    """round(more + share * tokens), half to even, in integers like `share_of`, int32.

    Args:
        tokens: int32 of any shape.
        share: in [0, 1].
    """
    p, q = _fraction(share)
    below, rest = more + share_of(tokens, share), tokens % q * p % q
    return below + jnp.where(2 * rest == q, below % 2, 2 * rest > q)


def _fraction(share: float) -> tuple[int, int]:
    return Fraction(share).limit_denominator(MOST).as_integer_ratio()
