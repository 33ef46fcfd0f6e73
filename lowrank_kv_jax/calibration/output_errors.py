"""What projected keys and values do to the output of each layer: a budget for it decides ranks (EigenAttention)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.calibration.backward import attend_exactly, residual_streams
from lowrank_kv_jax.calibration.taps import spread
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.estimators.rank_for_output import THRESHOLDS, OutputErrors, threshold_ranks, tried
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import block_output, block_taps
from lowrank_kv_jax.progress import ProgressBar

LENGTH, TEXTS = 512, 4
"""Tokens of a text, and how many of the calibration's are read."""


def key_and_value_moments(moments: Moments, layer: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Second moments of a layer: of all heads' keys before RoPE together `[D, D]`, of each head's values `[K, D, D]`."""
    return moments.per_head("k_pre", kv_heads)[layer].sum(0), moments.per_head("v", kv_heads)[layer]


def collect_output_errors(model: Any, moments: Moments, tokens: np.ndarray, progress: bool = False) -> OutputErrors:
    """Relative errors of each layer's output, the residual stream behind it, at each threshold.

    Every layer has the exact input; all tokens are coded, keys before RoPE in one basis of all heads.

    Args:
        model: a `LoadedModel`.
        moments: whose principal directions are the bases.
        tokens: int32 `[n, S]`.
    """
    config, kv_heads = model.config, model.config.attention.kv_heads
    texts = jnp.asarray(spread(tokens, min(LENGTH, tokens.shape[1]), TEXTS))
    errors = np.full((config.num_layers, len(THRESHOLDS)), np.inf)
    streams = residual_streams(config, model.params, texts)
    with ProgressBar("output errors", config.num_layers, progress) as bar:
        for layer, (own, window, weights) in enumerate(
            zip(config.by_layer, config.windows, model.params["layers"], strict=True)
        ):
            sides = [np.linalg.eigh(x.astype(np.float64)) for x in key_and_value_moments(moments, layer, kv_heads)]
            (k_values, k), (v_values, v) = ((values[..., ::-1], vectors[..., ::-1]) for values, vectors in sides)
            ranks = threshold_ranks(k_values, v_values)
            count = tried(ranks)
            bases = (jnp.asarray(x, jnp.float32) for x in (k, v))
            found = _errors(own, window, weights, streams[layer], *bases, jnp.asarray(ranks))
            errors[layer, :count] = np.asarray(found)[:count]
            bar.advance()
    return OutputErrors(errors)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _errors(config: ModelConfig, window: int | None, layer: Any, x: jax.Array, k: jax.Array, v: jax.Array, ranks):
    """`[50]` of bases `[D, D]` and `[K, D, D]` of which each pair of `ranks` `[50, 2]` takes the leading columns."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    taps = block_taps(config, layer, x, positions)
    more = () if taps.sink_logits is None else (taps.sink_logits,)
    attend = functools.partial(attend_exactly, config, window, taps.q)
    exact = block_output(config, layer, x, attend(taps.k, taps.v, *more)).astype(jnp.float32)

    def projected(u: jax.Array, tokens: jax.Array, rank: jax.Array) -> jax.Array:
        u = u * (jnp.arange(u.shape[-1]) < rank)
        u = jnp.broadcast_to(u, (tokens.shape[2], *u.shape[-2:]))
        out = jnp.einsum("btkd,kdr,ker->btke", tokens.astype(jnp.float32), u, u)
        return out.astype(tokens.dtype)

    def error(pair: jax.Array) -> jax.Array:
        keys, values = projected(k, taps.k_pre, pair[0]), projected(v, taps.v, pair[1])
        if config.attention.rope is not None:
            keys = rotate(keys, *rope_angles(config.attention.rope, positions[:, :, None]))
        out = block_output(config, layer, x, attend(keys, values, *more)).astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(out - exact)) / jnp.sum(jnp.square(exact)))

    return jax.lax.map(error, ranks)
