"""How the votes of a second reading are distributed over the layers of a model, from a calibration text."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.generation.forward import read_layer, start_reading
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.selections.reread import CHUNK, SINKS
from lowrank_kv_jax.storage.sharding import to_host

LENGTH = 1024
"""Tokens of a window that are read: shares of layers hardly change with more."""
EDGES = np.logspace(-6, 0, 61)
"""Of the bins that votes are counted in; smaller ones fall below the first."""


def collect_votes(model: Any, tokens: np.ndarray, progress: bool = False) -> np.ndarray:
    """Count the votes of each layer that exceed each edge.

    Args:
        model: a `LoadedModel`.
        tokens: int32 `[n, S]`; windows beyond `LENGTH`, or that the model's context cannot hold twice, are cut.
        progress: show a progress bar.

    Returns:
        float64 `[L, 61]`: the share of the tokens of all kv heads, sinks apart, whose votes exceed each of `EDGES`.

    Raises:
        ValueError: windows of sinks alone, or votes that are not finite (layer named).
    """
    config = model.config
    longest = config.context // 2 if config.context < 2 * CHUNK else config.context - CHUNK
    tokens = np.asarray(tokens, np.int32)[:, : min(LENGTH, longest)]
    if tokens.shape[1] <= SINKS:
        raise ValueError(f"windows of {tokens.shape[1]} tokens: the first {SINKS} are not counted")
    lengths = jnp.asarray([tokens.shape[1]], jnp.int32)
    above = np.zeros((config.num_layers, len(EDGES)))
    with ProgressBar("second reading", len(tokens) * config.num_layers, progress) as bar:
        for window in tokens:
            reading = start_reading(config, model.params, jnp.asarray(window[None]), lengths, twice=True)
            for layer in range(config.num_layers):
                reading, taps = read_layer(config, model.params, layer, reading)
                votes = to_host(taps.reread)[0, :, SINKS:].ravel()
                if not np.isfinite(votes).all():
                    raise ValueError(f"second reading: the votes of layer {layer} are not finite")
                above[layer] += (votes[:, None] > EDGES).mean(0)
                bar.advance()
    return above / len(tokens)
