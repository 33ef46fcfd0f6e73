"""Tokens as the attention ops take them."""

from typing import Any, NamedTuple

import jax


class CachedTokens(NamedTuple):
    """Tokens of a segment, J key and J' value heads of possibly different width.

    Attributes:
        keys: `[B, J, S, Dk]`, keys after RoPE or their coefficients.
        values: `[B, J', S, Dv]`.
        lengths: int32 `[B]`, valid tokens of each row.
        positions: original positions of the tokens.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array
    positions: Any  # Runs, or another state whose `at(slots)` gives positions [B, S] or [B, J, S]
