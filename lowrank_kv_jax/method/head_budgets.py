"""Budgets of heads that follow where a layer's attention lies (Feng et al., 2024, "Ada-KV")."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.choice import head_counts, ranks

ALLOCATIONS = ("official", "kvpress", "uniform")


def head_budgets(
    scores: jax.Array, owners: jax.Array, heads: int, budget: int, floor: int, share: float, allocation: str
) -> jax.Array:
    """How many candidates each head keeps.

    Args:
        scores: float32 `[B, S]` of the candidates of all heads; -inf for slots that are none.
        owners: int `[B, S]`, the head of each.
        heads: K.
        budget: tokens a head keeps on average.
        floor: tokens that every head keeps.
        share: "official": the share of a budget that is given out evenly, alpha.
        allocation: "official": c_h of the best K * budget of all heads are head h's, which keeps
            round(c_h (1 - alpha) + floor) (algorithm 2 of the official code; sums differ from K * budget by rounding);
            "kvpress": the best `floor` of each head, and then the best of all heads; "uniform": `budget` each.

    Returns:
        int32 `[B, K]`, never less than a head has where everything fits.
    """
    valid = scores > -jnp.inf
    total = heads * budget
    if allocation == "uniform":
        return jnp.full((scores.shape[0], heads), budget, jnp.int32)
    if allocation == "kvpress":
        scores = jnp.where(valid & (ranks(scores, owners, heads) < floor), jnp.inf, scores)
    best = head_counts(valid & (ranks(scores) < total), owners, heads)
    if allocation == "kvpress":
        return best
    even = jnp.round(best * (1 - share) + floor).astype(jnp.int32)
    everything = head_counts(valid, owners, heads)
    return jnp.where(everything.sum(-1, keepdims=True) <= total, everything, even)
