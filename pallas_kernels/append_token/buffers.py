"""What a decoded token is written to."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Int32


class Buffers(NamedTuple):
    """What tokens of each row are written to.

    Attributes:
        k, v: `[B, K, S, D]`, or storages of their own, which XLA writes to.
        length: int32 `[B]`, the slot that a row's first token takes.
    """

    k: Any
    v: Any
    length: Int32[jax.Array, " B"]
