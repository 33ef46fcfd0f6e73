"""The configuration of a model of any family from its HF `config.json`."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_defaults import with_defaults
from lowrank_kv_jax.models.deepseek_config import read_deepseek
from lowrank_kv_jax.models.gemma_config import read_gemma
from lowrank_kv_jax.models.gpt_config import read_gpt2, read_gpt_neox
from lowrank_kv_jax.models.gpt_oss_config import read_gpt_oss
from lowrank_kv_jax.models.llama_config import FAMILY_ATTRIBUTES, read_llama

_READERS = dict.fromkeys(FAMILY_ATTRIBUTES, read_llama) | {
    "deepseek_v2": read_deepseek, "gemma2": read_gemma, "gemma3_text": read_gemma, "gpt2": read_gpt2,
    "gpt_neox": read_gpt_neox, "gpt_oss": read_gpt_oss,
}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read the content of an HF `config.json`.

    Args:
        config: the parsed file, spelled as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) do.

    Raises:
        ValueError: unsupported family, attributes that are missing or unknown (all are listed), or values that this
            decoder does not implement.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise ValueError(f"model_type {family!r:.80} is not supported; it must be one of {sorted(_READERS)}")
    return _READERS[family](with_defaults(config))
