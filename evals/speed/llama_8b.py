"""The shape of Llama 3.1 8B, without a weight."""

from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameters import param_table

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=1, q_heads=32, kv_heads=8,
    head_dim=128, norm_eps=1e-5, rope=RopeSpec(500000.0, 128), context=131072, windows=(None,),
)
"""One layer of Llama 3.1 8B; its scaled frequencies change no shape."""


def layer_weights(config: ModelConfig = LLAMA_8B) -> Any:
    """Shapes of the first layer's weights, bfloat16."""
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16), param_table(config)["layers"][0])
