"""Back through a model layer by layer: one compiled program for each kind of layer, one residual stream kept for each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.attention.sink_logits import probabilities
from lowrank_kv_jax.generation.forward import embed_tokens
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import block_prefill, unembed


def causal_logits(
    config: ModelConfig, window: int | None, q: jax.Array, k: jax.Array, at: jax.Array | None = None
) -> jax.Array:
    """Float32 `[B, K, G, T, S]`, -inf where a key is not seen; q `[B, T, N, D]`, k `[B, S, K, D]`, N = K G.

    Plain causal attention: the blockwise op has a loop of dynamic length, which cannot be differentiated.

    Args:
        at: positions of the queries, int32 `[B, T]`; None counts from 0, as those of the keys do.
    """
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    logits = logits_of(logits, **config.attention.logits)
    at = jnp.arange(q.shape[1]) if at is None else at[:, None, None]
    distance = at[..., None] - jnp.arange(k.shape[1])
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return jnp.where(seen, logits, -jnp.inf)


def softmax(logits: jax.Array, sink_logits: jax.Array | None) -> jax.Array:
    """Probabilities of `causal_logits`, sinks `[N]` taking their share."""
    return probabilities(logits, sink_logits, heads=(1, 2))


def mixed(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Values `[B, S, K, D]` by probabilities `[B, K, G, T, S]`: `[B, T, N, D]`."""
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def attend_exactly(
    config: ModelConfig, window: int | None, q: jax.Array, k: jax.Array, v: jax.Array,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Causal attention that can be differentiated, `[B, T, N, D]`."""
    return mixed(softmax(causal_logits(config, window, q, k), sink_logits), v)


def layer_output(config: ModelConfig, layer: Any, x: jax.Array, attend: Any) -> jax.Array:
    """The residual stream `[B, T, H]` after a layer, from position 0 on; see `block_prefill` for `attend`."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return block_prefill(config, layer, x, positions, attend)[0]


def residual_streams(config: ModelConfig, params: Any, tokens: jax.Array) -> list[jax.Array]:
    """`[B, T, H]` before each layer, and after the last one; tokens int32 `[B, T]`."""
    streams = [embed_tokens(config, params, tokens)]
    for own, window, layer in zip(config.by_layer, config.windows, params["layers"], strict=True):
        streams.append(_forward(own, window, layer, streams[-1]))
    return streams


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(config: ModelConfig, window: int | None, layer: Any, x: jax.Array) -> jax.Array:
    return layer_output(config, layer, x, functools.partial(attend_exactly, config, window))


def loss_gradient(config: ModelConfig, params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Gradient `[B, T, H]` by the stream after the last layer of the mean negative log-likelihood of the next tokens,
    int32 `[B, T - 1]`."""
    return _loss_gradient(config, _surroundings(params), x, targets)


@functools.partial(jax.jit, static_argnums=0)
def _loss_gradient(config: ModelConfig, surroundings: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    def loss(x):
        logp = jax.nn.log_softmax(unembed(config, surroundings, x[:, :-1]), axis=-1)
        return -jnp.mean(jnp.take_along_axis(logp, targets[..., None], axis=-1))

    return jax.grad(loss)(x)


def sampled_targets(config: ModelConfig, params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Next tokens as the model would draw them, int32 `[B, T - 1]`, from the stream after the last layer."""
    return _sampled_targets(config, _surroundings(params), x, key)


@functools.partial(jax.jit, static_argnums=0)
def _sampled_targets(config: ModelConfig, surroundings: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.categorical(key, unembed(config, surroundings, x[:, :-1])).astype(jnp.int32)


def _surroundings(params: Any) -> Any:
    return {name: value for name, value in params.items() if name != "layers"}
