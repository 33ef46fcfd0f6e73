"""How the votes of a second reading are distributed over the layers of a model, from a calibration text."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import read_layer, start_reading
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.selections.reread import CHUNK, SINKS
from lowrank_kv_jax.storage.sharding import to_host

LENGTH = 1024
"""Tokens of a window that are read: shares of layers hardly change with more."""
EDGES = np.logspace(-6, 0, 61)
"""Of the bins that votes are counted in; smaller ones fall below the first."""


def text_length(config: ModelConfig, window: int) -> int:
    """Tokens that are read of windows of so many. Raises ValueError where none of them would count."""
    longest = config.context // 2 if config.context < 2 * CHUNK else config.context - CHUNK
    length = min(window, LENGTH, longest)
    if length <= SINKS:
        raise ValueError(f"length={length}: must be at least {SINKS + 1}, as the first {SINKS} tokens of a window are "
                         "not counted")
    return length


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
    tokens = np.asarray(tokens, np.int32)[:, : text_length(config, tokens.shape[1])]
    lengths = jnp.asarray([tokens.shape[1]], jnp.int32)
    above, counted = np.zeros((config.num_layers, len(EDGES))), 0
    with ProgressBar("second reading", len(tokens) * config.num_layers, progress) as bar:
        for window in tokens:
            reading = start_reading(config, model.params, jnp.asarray(window[None]), lengths, twice=True)
            for layer in range(config.num_layers):
                reading, taps = read_layer(config, model.params, layer, reading)
                above[layer] += votes_above(taps, [tokens.shape[1]], layer)
                bar.advance()
            counted += votes_counted(config.attention.kv_heads, [tokens.shape[1]])
    return above / counted


def votes_above(taps: Taps, lengths: Sequence[int], layer: int) -> np.ndarray:
    """How many votes of a layer exceed each of `EDGES`, int `[61]`; those for sinks and padding do not count.

    Args:
        taps: of texts that were read twice, without their copies.
        lengths: tokens of each row.
        layer: its number, for messages.

    Raises:
        ValueError: votes that are not one for each token, or not finite.
    """
    (batch, tokens, heads), votes = taps.k.shape[:3], taps.reread
    if votes is None or votes.shape != (batch, heads, tokens):
        raise ValueError(f"taps.reread of layer {layer}: must be {(batch, heads, tokens)} [batch, kv_heads, tokens], of "
                         f"texts without their copies, and is {None if votes is None else votes.shape}")
    counted = np.concatenate([own[:, SINKS:length].ravel() for own, length in zip(to_host(votes), lengths, strict=True)])
    if not np.isfinite(counted).all():
        raise ValueError(f"second reading: the votes of layer {layer} are not finite")
    return counted.size - np.searchsorted(np.sort(counted), EDGES, side="right")


def votes_counted(kv_heads: int, lengths: Sequence[int]) -> int:
    """Of how many votes `votes_above` counts."""
    return kv_heads * sum(max(length - SINKS, 0) for length in lengths)
