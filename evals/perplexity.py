"""Perplexity of a text that is scored in blocks through a compressed cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.cache import Cache
from lowrank_kv_jax.forward import DEFAULT_BLOCK, extend, prefill, refresh
from lowrank_kv_jax.method import KVMethod


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihoods in nats, float64 `[B, T]`, one for each scored token."""

    nll: np.ndarray

    @property
    def ppl(self) -> float:
        """exp of the mean over all scored tokens."""
        return float(np.exp(np.mean(self.nll)))


@functools.partial(jax.jit)
def token_nll(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """-log p of `tokens` `[B, T]` under `logits` `[B, T, V]`."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]


def score_through_cache(
    method: KVMethod, model: Any, cache: Cache, logits: jax.Array, tokens: np.ndarray, *, bases: Any = None
) -> Perplexity:
    """Score a continuation of what a cache holds, all of its tokens.

    Each block of `layout.block` tokens is appended, attends through the cache, and is folded into it by
    `refresh`.

    Args:
        cache: consumed; `fork` it first to keep it.
        logits: `[B, V]` at the last token that the cache holds: they predict the first one scored.
        tokens: int32 `[B, T]`.
    """
    tokens = np.asarray(tokens, np.int32)
    batch, count = tokens.shape
    block = cache.layout.block
    parts = [token_nll(logits[:, None], jnp.asarray(tokens[:, :1]))]
    cache = refresh(method, cache, bases=bases)
    for begin in range(0, count - 1, block):
        here = min(block, count - 1 - begin)  # the last token predicts nothing that is scored
        inputs, targets = np.zeros((2, batch, block), np.int32)
        inputs[:, :here] = tokens[:, begin : begin + here]
        targets[:, :here] = tokens[:, begin + 1 : begin + 1 + here]
        cache, logits = extend(
            method, model.config, model.params, cache, jnp.asarray(inputs),
            jnp.full((batch,), here, jnp.int32), bases=bases, all_logits=True,
        )
        parts.append(token_nll(logits, jnp.asarray(targets))[:, :here])
        cache = refresh(method, cache, bases=bases)
    return Perplexity(np.concatenate([np.asarray(part, np.float64) for part in parts], axis=1))


def perplexity(
    model: Any, method: KVMethod, tokens: np.ndarray, prefix: int, *, bases: Any = None,
    block: int = DEFAULT_BLOCK, dtype: Any = None,
) -> Perplexity:
    """Prefill and compress the first `prefix` tokens of each row `[B, S]`, and score the rest through the
    cache.

    Raises:
        ValueError: a prefix that leaves nothing to compress or nothing to score; see also `prefill`.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or not 1 <= prefix < tokens.shape[1]:
        raise ValueError(f"prefix={prefix}: must lie in 1..{tokens.shape[-1] - 1} for tokens {tokens.shape}")
    cache, logits = prefill(
        method, model.config, model.params, jnp.asarray(tokens[:, :prefix]), bases=bases,
        capacity=tokens.shape[1], block=block, dtype=dtype,
    )
    return score_through_cache(method, model, cache, logits, tokens[:, prefix:], bases=bases)
