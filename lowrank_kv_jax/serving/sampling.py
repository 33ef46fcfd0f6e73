"""Choosing the next token of rows that each ask for it in their own way; `generation.sampling` where all ask alike."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from lowrank_kv_jax.generation.sampling import likely


class Draws(NamedTuple):
    """How each row draws, `[B]` each; the fields of `Sampler` as arrays.

    Attributes:
        seed: uint32.
        temperature: float32, 0 is greedy.
        top_k: int32, the size of the vocabulary or more for all.
        top_p: float32 in (0, 1].
    """

    seed: UInt32[jax.Array | np.ndarray, " B"]
    temperature: Float[jax.Array | np.ndarray, " B"]
    top_k: Int[jax.Array | np.ndarray, " B"]
    top_p: Float[jax.Array | np.ndarray, " B"]


def sample_rows(
    draws: Draws, logits: Float[jax.Array, "B V"], step: Int[jax.Array | np.ndarray, " B"]
) -> Int[jax.Array, " B"]:
    """Tokens int32 `[B]` from logits `[B, V]`: of each row what `sample` draws with its sampler, key and step.

    Nothing is sorted where no row asks for `top_k` or `top_p`, and nothing drawn where all are greedy.

    Args:
        step: what tells a row's draws apart: the position of the token that is drawn.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    hot = draws.temperature > 0

    def drawn():
        scaled = logits / jnp.where(hot, draws.temperature, 1.0)[:, None]
        few = hot & ((draws.top_k < logits.shape[1]) | (draws.top_p < 1))
        left = jax.lax.cond(jnp.any(few), lambda x: likely(x, draws.top_k, draws.top_p), lambda x: x, scaled)
        keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(draws.seed), step)
        return jnp.where(hot, jax.vmap(jax.random.categorical)(keys, left).astype(jnp.int32), greedy)

    return jax.lax.cond(jnp.any(hot), drawn, lambda: greedy)


@jax.jit
def first_tokens(
    draws: Draws, logits: Float[jax.Array, "n V"], step: Int[jax.Array | np.ndarray, " n"]
) -> tuple[Int[jax.Array, " n"], Bool[jax.Array, " n"]]:
    """The tokens behind a prompt, int32 `[n]`, and of which rows the logits are NaN, bool `[n]`."""
    return sample_rows(draws, logits, step), jnp.any(jnp.isnan(logits), axis=-1)
