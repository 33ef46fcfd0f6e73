"""A tiny model with random weights, and prompts for it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import init_params

PLAIN = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    q_heads=8,
    kv_heads=4,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0, 8),
    context=512,
    windows=(None, None, None),
)
"""Three layers of four kv heads."""

PROMPT, CAPACITY, BLOCK = 96, 160, 16


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `generate`, `save_cache` and `load_cache` read of a model."""

    config: ModelConfig
    params: Any
    tokenizer: Any = None
    name: str = "tiny"
    fingerprint: str = "f" * 64


@functools.cache
def model(config: ModelConfig = PLAIN) -> Model:
    """The model of a configuration, always the same weights."""
    return Model(config, init_params(config, jax.random.key(0)))


def prompts(rows: int = 2, length: int = PROMPT, seed: int = 0, vocab: int = PLAIN.vocab_size) -> jax.Array:
    """Random ids, int32 `[rows, length]`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (rows, length)), jnp.int32)
