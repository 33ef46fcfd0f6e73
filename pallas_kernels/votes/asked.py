"""Whom queries vote for."""

from typing import NamedTuple

import jax

from lowrank_kv_jax.storage.cached_tokens import Beside


class Asked(NamedTuple):
    """Tokens that queries vote for.

    Attributes:
        votes: float32 `[B, J, S]`, those that are there.
        tokens: with the queries `[B, T, N, D]`; their values are not read.
    """

    votes: jax.Array
    tokens: Beside
