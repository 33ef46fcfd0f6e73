"""Tiny random checkpoints of the families whose weights have names of their own, as they lie in published directories.

The golden script writes them for transformers to load, the tests for the package: both read the same files.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from goldens.tiny_models import random_tensor
from safetensors.numpy import save_file

from lowrank_kv_jax import models
from lowrank_kv_jax.models.parameters import stored_arrays

_BASE = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
_PHI3 = _BASE | {"model_type": "phi3", "original_max_position_embeddings": 128}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.0, 1.1, 1.2, 1.4, 1.5],
             "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0]}
_QWEN3_MOE = _BASE | {
    "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_SMOLLM3 = _BASE | {"model_type": "smollm3", "no_rope_layer_interval": 2, "tie_word_embeddings": True}
_GEMMA = {name: value for name, value in _BASE.items() if name not in ("hidden_act", "tie_word_embeddings")} | {
    "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 12,
}

_GPT_OSS = _BASE | {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "sliding_window": 12,
    "num_local_experts": 8, "num_experts_per_tok": 4, "swiglu_limit": 0.8, "rope_theta": 1000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
}

# HF configs; goldens run past windows and original contexts (32).
FAMILIES = {
    "phi3": _PHI3 | {"sliding_window": 12},
    "phi3_longrope": _PHI3
    | {"hidden_size": 64, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75, "rope_scaling": _LONGROPE},
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": _QWEN3_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "smollm3": _SMOLLM3,
    "smollm3_listed": _SMOLLM3
    | {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 12,
       "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "gemma2": _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": _GEMMA | {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 100.0,
                             "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3},
    "gpt_oss": _GPT_OSS,
}
POSITIONS = np.r_[3, 17, 40:71:6]
"""Of a text, whose logits the goldens hold."""
COLUMNS = slice(0, 96, 4)


def tensors_of(config: dict) -> dict[str, np.ndarray]:
    """float32 tensors by their published names."""
    infos = stored_arrays(models.read_config(config))
    shapes = {name: info.tensor_shape for info in infos for name in info.names("hf")}
    return {name: random_tensor(name, shape) for name, shape in shapes.items()}


def write_checkpoint(directory: Path, name: str) -> Path:
    """`config.json` and `model.safetensors` of a tiny model."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(FAMILIES[name]))
    save_file(tensors_of(FAMILIES[name]), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def mxfp4_codes(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks `[E, out, in / 32, 16]` and scales `[E, out, in / 32]` of a weight `[E, in, out]`, uint8."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    experts, ins, outs = shape
    scales = rng.integers(120, 127, (experts, outs, ins // 32), dtype=np.uint8)
    return rng.integers(0, 256, (*scales.shape, 16), dtype=np.uint8), scales
