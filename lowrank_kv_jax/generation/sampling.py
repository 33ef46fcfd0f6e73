"""Choosing the next token."""

import dataclasses
from numbers import Real

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Key

from lowrank_kv_jax.checks.bounds import check_int, check_kind, check_number

LEAST = 1e-6
"""Of temperatures above 0."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn. A pytree of the numbers it draws by: other numbers compile nothing anew; whether it is
    greedy, and which of the fields it has, belong to its structure.

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
        if self.top_k is not None:
            check_int("top_k", self.top_k, 1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r}: must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return "temperature" not in self._numbers

    @property
    def _numbers(self) -> tuple[str, ...]:
        """Fields that say how something is drawn; those that leave everything as it is do not."""
        if isinstance(self.temperature, Real) and self.temperature == 0:
            return ()
        idle = {"top_k": self.top_k is None, "top_p": isinstance(self.top_p, Real) and self.top_p == 1}
        return tuple(name for name in ("temperature", "top_k", "top_p") if not idle.get(name))

    def tree_flatten(self):
        return tuple(getattr(self, name) for name in self._numbers), self._numbers

    @classmethod
    def tree_unflatten(cls, names, numbers):
        found = object.__new__(cls)  # what stands for numbers while a program is traced has no value to check
        for field in dataclasses.fields(cls):
            object.__setattr__(found, field.name, dict(zip(names, numbers, strict=True)).get(field.name, field.default))
        return found


def sample(
    sampler: Sampler, logits: Float[jax.Array, "B V"], keys: Key[jax.Array, " B"],
    step: Int[jax.Array, " B"] | Int[jax.Array, ""],
) -> Int[jax.Array, " B"]:
    """Tokens int32 `[B]` from logits `[B, V]`.

    Args:
        keys: one PRNG key a row `[B]`: what a row draws depends on its own key and `step` only, not on the batch.
        step: int32 `[B]` or scalar, what tells a row's draws apart: the position of the token that is drawn.
    """
    if sampler.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampler.temperature
    if len(sampler._numbers) > 1:
        rows, size = logits.shape
        top_k = jnp.full(rows, size if sampler.top_k is None else sampler.top_k, jnp.int32)
        logits = likely(logits, top_k, jnp.full(rows, sampler.top_p, jnp.float32))
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(step, keys.shape[:1]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def likely(
    logits: Float[jax.Array, "B V"], top_k: Int[jax.Array, " B"], top_p: Float[jax.Array, " B"]
) -> Float[jax.Array, "B V"]:
    """Logits `[B, V]`, -inf for tokens beyond each row's `top_k` and `top_p`."""
    ordered = jnp.sort(logits, axis=-1)[:, ::-1]
    last = jnp.minimum(top_k, logits.shape[1])[:, None] - 1
    kth = jnp.take_along_axis(ordered, last, axis=-1)
    ordered = jnp.where(ordered < kth, -jnp.inf, ordered)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability  # mass of the tokens ahead
    p = top_p[:, None]
    stays = (before < p) | (before == 0) | (p >= 1)  # the first one whatever p is, which may be too small for float32
    least = jnp.min(jnp.where(stays, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < jnp.maximum(kth, least), -jnp.inf, logits)
