"""Llama-like families, GPTs and DeepSeek-V2 in Flax NNX; weights are converted from HF and GGUF files as they load."""

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import (
    block_output,
    block_taps,
    embed,
    init_params,
    param_axes,
    unembed,
)
from lowrank_kv_jax.models.hf_config import read_config
from lowrank_kv_jax.models.load import LoadedModel, load_model
from lowrank_kv_jax.models.parameter_sharding import param_shardings

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "block_output",
    "block_taps",
    "embed",
    "init_params",
    "load_model",
    "param_axes",
    "param_shardings",
    "read_config",
    "unembed",
]
