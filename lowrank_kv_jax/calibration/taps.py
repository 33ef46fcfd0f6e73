"""Windows of a corpus, and what the layers of a model show of them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import embed_tokens, layer_prefill
from lowrank_kv_jax.models.config import ModelConfig


def iterate_taps(config: ModelConfig, params: Any, tokens: Int[jax.Array | np.ndarray, "B S"]) -> Iterator[Taps]:
    """The taps of each layer in order, of tokens `[B, S]` without padding that attend exactly and causally.

    One compiled program serves all layers that have the same window and the same rotary embedding.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x = embed_tokens(config, params, jnp.asarray(tokens, jnp.int32))
    for own, window, layer in zip(config.by_layer, config.windows, params["layers"], strict=True):
        x, taps = layer_prefill(own, window, layer, x, positions)
        yield taps


def checked_windows(config: ModelConfig, tokens: np.ndarray) -> Int[np.ndarray, "n S"]:
    """Windows of a corpus as int32 `[n, S]`.

    Raises:
        ValueError: a model that caches latents, no tokens, windows beyond its context, ids outside of its vocabulary.
    """
    if config.attention.latent is not None:
        raise ValueError("calibration: this model caches latents (MLA); no method that does so is calibrated")
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError("tokens: expected non-empty integers [windows, length], got "
                         f"{tokens.dtype}{tokens.shape}")
    if tokens.shape[1] > config.context:
        raise ValueError(f"windows of {tokens.shape[1]} tokens: the model's context is {config.context}")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"token ids {tokens.min()}..{tokens.max()}: the vocabulary has {config.vocab_size}")
    return tokens.astype(np.int32)


def spread(tokens: np.ndarray, length: int, most: int) -> Int[np.ndarray, "m T"]:
    """Texts of `length` tokens, int32 `[n, length]`, taken evenly from windows `[m, S]`: at most so many."""
    texts = np.asarray(tokens, np.int32)[:, : tokens.shape[1] // length * length].reshape(-1, length)
    return texts[np.unique(np.linspace(0, len(texts) - 1, min(most, len(texts))).round().astype(int))]
