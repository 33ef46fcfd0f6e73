"""Tiny random models of every family, made alike by the golden script (torch) and by the tests (JAX).

A golden then holds only tokens and logits: the weights are drawn by NumPy from the name of each tensor.
"""

import zlib

import numpy as np

_BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# HF configs; LENGTH tokens run past the original contexts of the scaled ones (32) and past the windows.
CONFIGS = {
    "llama2": _BASE | {"model_type": "llama"},
    "llama2_mha_bias": _BASE
    | {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "llama2_tied": _BASE | {"model_type": "llama", "tie_word_embeddings": True},
    "llama3.1": _BASE | {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "longchat": _BASE
    | {
        "model_type": "llama",
        "max_position_embeddings": 32,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral": _BASE | {"model_type": "mistral", "sliding_window": 12},
    "qwen2": _BASE | {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen2_window": _BASE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "qwen3": _BASE | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_untied": _BASE | {"model_type": "qwen3", "head_dim": 16},
}
_GPT2 = {
    "model_type": "gpt2", "vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "bos_token_id": 1, "eos_token_id": 2,
}
_NEOX = {
    "model_type": "gpt_neox", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "rotary_pct": 0.5, "rotary_emb_base": 10000,
    "layer_norm_eps": 1e-5, "use_parallel_residual": True, "hidden_act": "gelu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}
GPT_CONFIGS = {
    "gpt2": _GPT2,
    "gpt2_inner": _GPT2 | {"n_inner": 72, "activation_function": "gelu"},
    "gpt_neox": _NEOX,
    "gpt_neox_serial": _NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500},
}
LENGTH = 72
PREFILL = 41  # the tokens after these may be fed one by one through a cache


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of the HF tensor `name` (matrices `[out, in]`)."""
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        draw = 1 + 0.2 * draw
    elif name.endswith(".bias"):
        draw = 0.2 * draw
    elif name.endswith(".sinks"):
        draw = 2 + draw
    else:
        draw = draw * shape[-1] ** -0.5
    return draw.astype(np.float32)


def random_tokens(vocab_size: int, seed: int = 0) -> np.ndarray:
    """int32 `[2, LENGTH]`."""
    return np.random.default_rng(seed).integers(0, vocab_size, (2, LENGTH)).astype(np.int32)

_DEEPSEEK = {
    "model_type": "deepseek_v2",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}

# One dense layer, then two with experts; the full model and the Lite one, without and with YaRN.
DEEPSEEK = {
    "deepseek_v2": _DEEPSEEK
    | {
        "q_lora_rank": 20,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2_lite": _DEEPSEEK
    | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v2_yarn": _DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "rope_scaling": _YARN},
}
