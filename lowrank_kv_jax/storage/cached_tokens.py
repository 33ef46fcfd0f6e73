"""Tokens as the attention ops take them."""

from typing import Any, NamedTuple

import jax

from lowrank_kv_jax.storage.state import state, static


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


@state
class Beside:
    """Other tokens that the same tokens' queries attend to, with values of the same space.

    Attributes:
        q: queries as they meet these keys `[B, T, N, D]`.
        tokens: them.
        q_positions: int32 `[B, T]`.
        causal: whether some may lie after a query.
        window: sliding window in tokens, or None.
    """

    q: jax.Array
    tokens: CachedTokens
    q_positions: jax.Array
    causal: bool = static()
    window: int | None = static(default=None)
