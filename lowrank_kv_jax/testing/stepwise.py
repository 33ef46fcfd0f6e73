"""A model through a cache, step by step: what every faster loop is compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.testing.models import BLOCK, CAPACITY, model
from lowrank_kv_jax.testing.moments import bases_for


def run(
    method: Part,
    config: ModelConfig,
    tokens: jax.Array,
    prompt: int,
    *,
    lengths: jax.Array | None = None,
    capacity: int = CAPACITY,
    block: int = BLOCK,
    width: int = 1,
    dtype=jnp.float32,
) -> tuple[Any, np.ndarray]:
    """Prefill `tokens[:, :prompt]` and append the rest `width` tokens at a time, refreshing after each block.

    Returns the cache, and logits `[B, 1 + steps, V]` of the prompt's and of each piece's last token.
    """
    params, bases = model(config).params, bases_for(method, config)
    cache, logits = prefill(
        method,
        config,
        params,
        tokens[:, :prompt],
        lengths,
        bases=bases,
        capacity=capacity,
        block=block,
        dtype=dtype,
    )
    out = [logits]
    for i, begin in enumerate(range(prompt, tokens.shape[1], width)):
        if i and i % (block // width) == 0:
            cache = refresh(method, cache, bases=bases)
        cache, logits = extend(method, config, params, cache, tokens[:, begin : begin + width], bases=bases)
        out.append(logits)
    return cache, np.stack([np.asarray(x) for x in out], axis=1)
