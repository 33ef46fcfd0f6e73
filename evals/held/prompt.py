"""A prompt through a method: what is held of it, layer by layer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.importance import window_attention
from lowrank_kv_jax.generation.forward import prefill, read_layer, start_reading
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import CacheBytes, cache_bytes
from lowrank_kv_jax.method.held import Held, held_tokens, layer_bytes
from lowrank_kv_jax.methods import machine_of

QUERIES = 32
"""The prompt's last queries, whose attention is looked at."""


class HeldPrompt(NamedTuple):
    """What a cache holds of a prompt.

    Attributes:
        held: int8 `[L, K, T]` of `Held`.
        attention: of each layer and kv head the share of its last queries' exact attention that falls on tokens that are
            held, `[L, K]` in 0..1; NaN for layers with a sliding window and for latent attention.
        layer_bytes: of each layer.
        size: of the cache as a whole, and of the bases that it is read with.
        summarised: whether a summary stands for what is not held.
        counts: of each layer, what its codec counts by name (`Codec.counted`): chunks and slots for them.
    """

    held: np.ndarray
    attention: np.ndarray
    layer_bytes: tuple[int, ...]
    size: CacheBytes
    summarised: bool
    counts: tuple[dict[str, int], ...]


def hold_prompt(model: Any, method: Part, ids: list[int], *, bases: Any = None, dtype: Any = None) -> HeldPrompt:
    """Prefill a prompt, with room for one block more, and look at what the cache holds of it.

    Args:
        model: from `load_model`.
        bases: where the method needs them.
        dtype: of the cache.

    Raises:
        ValueError: as `prefill`.
    """
    config, tokens = model.config, jnp.asarray([ids], jnp.int32)
    capacity = min(len(ids) + method.default_block, max(config.context, len(ids)))
    cache, _ = prefill(method, config, model.params, tokens, bases=bases, capacity=capacity, dtype=dtype)
    held = held_tokens(cache)
    attention = attention_on(config, model.params, tokens, held > Held.GONE)
    machine, counts = machine_of(method), {}
    for layers, group in zip(method.layer_groups(config.attention), cache.groups, strict=True):
        found = {name: int(count(group.store)[0]) for name, count in machine.codec.counted.items()}
        counts |= dict.fromkeys(layers, found)
    size, summarised = cache_bytes(cache, bases), machine.standing is not None
    in_order = tuple(counts[layer] for layer in range(config.num_layers))
    return HeldPrompt(held, attention, layer_bytes(cache), size, summarised, in_order)


def attention_on(config: Any, params: Any, tokens: jax.Array, there: np.ndarray) -> np.ndarray:
    """The share of the exact attention of a prompt's last queries that falls on tokens.

    Args:
        tokens: int32 `[1, T]`.
        there: bool `[L, K, T]`.

    Returns:
        `[L, K]`, NaN for layers with a sliding window and for latent attention.
    """
    share = np.full(there.shape[:2], np.nan)
    spec, length = config.attention, jnp.full((1,), tokens.shape[1], jnp.int32)
    if spec.latent is not None:
        return share
    reading = start_reading(config, params, tokens, length, twice=False)
    for layer, window in enumerate(spec.windows):
        reading, taps = read_layer(config, params, layer, reading)
        if window is None:
            votes = np.asarray(_votes(spec, taps.q, taps.k, length, taps.sink_logits))[0]
            share[layer] = (votes * there[layer]).sum(-1) / votes.sum(-1)
    return share


@functools.partial(jax.jit, static_argnums=0)
def _votes(spec, q, k, length, sink_logits):
    return window_attention(q, k, length, QUERIES, sink_logits=sink_logits, **spec.logits)
