"""Budgets of heads that follow where a layer's attention lies (Feng et al., 2024, "Ada-KV")."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.choice import head_counts, ranks
from lowrank_kv_jax.method.token_share import rounded_with_share

ALLOCATIONS = ("official", "kvpress", "uniform")


class HeadShares(NamedTuple):
    """How heads share what a layer keeps.

    Attributes:
        allocation: "official": c_h of the best K * budget of all heads are head h's, which keeps
            round(c_h (1 - alpha) + floor) (algorithm 2 of the official code; sums differ from K * budget by rounding);
            "kvpress": the best `floor` of each head, and then the best of all heads; "uniform": the budget each.
        alpha: share of the budget that is given out evenly.
        ends: exact tokens, which count among those that a head is sure of in "kvpress".
    """

    allocation: str
    alpha: float
    ends: int

    def floor(self, budget: int) -> int:
        """Tokens that every head keeps, of `budget` on average."""
        if self.allocation == "kvpress":
            return max(int((budget + self.ends) * self.alpha) - self.ends, 0)
        return int(budget * self.alpha)


def head_budgets(
    scores: jax.Array, owners: jax.Array, heads: int, budget: int, shares: HeadShares
) -> jax.Array:
    """How many candidates each head keeps.

    Args:
        scores: float32 `[B, S]` of the candidates of all heads; -inf for slots that are none.
        owners: int `[B, S]`, the head of each.
        heads: K.
        budget: tokens a head keeps on average.

    Returns:
        int32 `[B, K]`, never less than a head has where everything fits.
    """
    valid, allocation, floor = scores > -jnp.inf, shares.allocation, shares.floor(budget)
    total = heads * budget
    if allocation == "uniform":
        return jnp.full((scores.shape[0], heads), budget, jnp.int32)
    if allocation == "kvpress":
        scores = jnp.where(valid & (ranks(scores, owners, heads) < floor), jnp.inf, scores)
    best = head_counts(valid & (ranks(scores) < total), owners, heads)
    if allocation == "kvpress":
        return best
    even = rounded_with_share(floor, best, 1 - shares.alpha)
    everything = head_counts(valid, owners, heads)
    return jnp.where(everything.sum(-1, keepdims=True) <= total, everything, even)
