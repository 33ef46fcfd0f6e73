"""How far predictions through a cache are from those through the full one.

Perplexity of a text barely moves where its next tokens stand near the exact ones; the divergence of the predictions sees
what compression changed, whatever the next token is.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.storage.sharding import to_host

LIKELIEST = 64
"""Tokens that are told apart; all others count as one. That makes a divergence smaller: of SmolLM2-135M on prose, whose
64 likeliest tokens hold 92%, by 11% (`kivi` in 4 and 2 bits, `streamingllm`), and by more where predictions are flat."""


class Predictions:
    """The full cache's predictions of each token of a text, in order; another cache may read it in other blocks.

    Attributes:
        seconds: that were spent here, so that they need not count as scoring.
    """

    def __init__(self):
        self._tokens: list[tuple[np.ndarray, np.ndarray]] = []
        self.seconds = 0.0

    def keep(self, logits: jax.Array) -> None:
        """Those of the next piece, from `[B, T, V]`."""
        begin = _begin(logits)
        ids, known = map(to_host, _likeliest(logits))
        self._tokens += zip(ids.swapaxes(0, 1), known.swapaxes(0, 1), strict=True)
        self.seconds += time.perf_counter() - begin

    def divergence(self, at: int, logits: jax.Array) -> np.ndarray:
        """KL(full || this) in nats `[B, T]` of another cache's logits `[B, T, V]` behind `at` tokens; T is less where
        those that are known end."""
        begin = _begin(logits)
        ids, known = (np.stack(side, axis=1) for side in zip(*self._tokens[at : at + logits.shape[1]], strict=True))
        found = to_host(_divergence(ids, known, logits[:, : ids.shape[1]]))
        self.seconds += time.perf_counter() - begin
        return found


def _begin(logits: jax.Array) -> float:
    """The time at which they are there."""
    jax.block_until_ready(logits)
    return time.perf_counter()


@jax.jit
def _likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids `[B, T, LIKELIEST]`, and their log probabilities followed by that of all other tokens."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    first, ids = jax.lax.top_k(logp, min(LIKELIEST, logits.shape[-1]))
    return ids, _with_rest(first)


@jax.jit
def _divergence(ids: jax.Array, known: jax.Array, logits: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    found = _with_rest(jnp.take_along_axis(logp, ids, axis=-1))
    return jnp.maximum(jnp.sum(jnp.exp(known) * (known - found), axis=-1), 0.0)


def _with_rest(logp: jax.Array) -> jax.Array:
    rest = jnp.maximum(-jnp.expm1(jax.nn.logsumexp(logp, axis=-1, keepdims=True)), 1e-7)
    return jnp.concatenate([logp, jnp.log(rest)], axis=-1)
