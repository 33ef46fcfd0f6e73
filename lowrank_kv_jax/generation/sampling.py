"""Choosing the next token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Key

from lowrank_kv_jax.checks.bounds import check_kind, check_number
from lowrank_kv_jax.checks.shown import short

LEAST = 1e-6
"""Of temperatures above 0."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn; hashable by value.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k most likely tokens, None for all.
        top_p: only the smallest set of most likely tokens whose probability reaches p, 1 for all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        for name in ("temperature", "top_p"):
            check_kind(name, getattr(self, name), (float,))
            check_number(name, getattr(self, name), 0)
        if 0 < self.temperature < LEAST:  # logits would overflow
            raise ValueError(f"temperature={self.temperature!r}: must be 0, which is greedy, or at least {LEAST:g}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={short(self.top_k)}: must be an int of at least 1, or None")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: must lie in (0, 1]")


def sample(
    sampler: Sampler, logits: Float[jax.Array, "B V"], keys: Key[jax.Array, " B"],
    step: Int[jax.Array, " B"] | Int[jax.Array, ""],
) -> Int[jax.Array, " B"]:
    """Tokens int32 `[B]` from logits `[B, V]`.

    Args:
        keys: one PRNG key a row `[B]`: what a row draws depends on its own key and `step` only, not on the batch.
        step: int32 `[B]` or scalar, what tells a row's draws apart: the position of the token that is drawn.
    """
    if sampler.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampler.temperature
    if sampler.top_k is not None:
        kth = jax.lax.top_k(logits, min(sampler.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if sampler.top_p < 1:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability  # mass of the tokens ahead: the first always stays
        least = jnp.min(jnp.where(before < sampler.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(step, keys.shape[:1]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
