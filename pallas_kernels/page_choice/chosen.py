"""The pages that a step reads."""

from typing import NamedTuple

import jax
from jaxtyping import Int32


class Chosen(NamedTuple):
    """Pages of each unit, whose heads share their tokens' codes.

    Attributes:
        pages: int32 `[B, U, n]`, ascending; where there are fewer, the number of all pages stands for those that are
            missing.
        tokens: int32 `[B]`, which they hold: as many of each unit.
    """

    pages: Int32[jax.Array, "B U n"]
    tokens: Int32[jax.Array, " B"]
