"""Configurations of the families that differ from Llama in a few attributes."""

import warnings
from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import REQUIRED, refuse_unknown, token_ids
from lowrank_kv_jax.models.experts_config import ExpertsConfig
from lowrank_kv_jax.models.rope_config import LLAMA_KINDS, read_rope

_QWEN_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_DUAL_CHUNKS = "dual_chunk_attention_config"  # of the 1M variants of Qwen2.5 and Qwen3

FAMILY_ATTRIBUTES = {
    "llama": {"attention_bias", "mlp_bias", "rope_condense_ratio"},
    "mistral": {"sliding_window"},
    "qwen2": _QWEN_WINDOW | {_DUAL_CHUNKS},
    "qwen3": _QWEN_WINDOW | {_DUAL_CHUNKS, "attention_bias"},
    # dropout and where published code lies say nothing of inference
    "phi3": {"sliding_window", "partial_rotary_factor", "original_max_position_embeddings", "resid_pdrop", "embd_pdrop",
             "auto_map"},
    "mixtral": {"sliding_window", "num_local_experts", "num_experts_per_tok", "router_jitter_noise"},
    "smollm3": _QWEN_WINDOW | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
    "qwen3_moe": _QWEN_WINDOW - {"layer_types"} | {
        "attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    },
}

# Attributes that change what is computed, each with the only value that the decoder implements.
_FIXED_VALUES = {
    "hidden_act": "silu",
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
}
_FIXED_OF_PHI3 = {
    "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
}

# What a family's config stands for where it does not say, or says null; see `config_defaults`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "phi3": {"rms_norm_eps": 1e-5},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 128},
    "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
}


def read_llama(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Llama-like model from the content of its `config.json`.

    Dual chunk attention (Qwen2.5-7B-Instruct-1M) is not applied: attention is plain, with a warning that says so.

    Raises:
        ValueError: as `read_config`.
    """
    family = config["model_type"]
    known = FAMILY_ATTRIBUTES[family]
    fixed = _FIXED_VALUES | (_FIXED_OF_PHI3 if family == "phi3" else {})
    refuse_unknown(config, family, REQUIRED, known, {name: value for name, value in fixed.items() if name not in known})
    config = _DEFAULTS.get(family, {}) | {name: value for name, value in config.items() if value is not None}
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if chunks := config.get(_DUAL_CHUNKS):
        _warn_of_plain_attention(chunks)
    phi3 = family == "phi3"
    rope = read_rope(config, head_dim, ("default", "longrope") if phi3 else LLAMA_KINDS, partial=phi3)
    ropes = [rope.rope if turned else None for turned in _rotary_layers(config)] if family == "smollm3" else [rope.rope]
    attention_bias = bool(config.get("attention_bias"))
    return ModelConfig(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        q_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=rope.rope,
        context=rope.context,
        windows=_read_windows(config, family, num_layers),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")),
        rope_magnitude=rope.magnitude,
        ropes=tuple(ropes) if len(set(ropes)) > 1 else None,
        moe=_read_experts(config, family),
    )


def _warn_of_plain_attention(chunks: Any) -> None:
    if not isinstance(chunks, Mapping):
        raise ValueError(f"{_DUAL_CHUNKS}={chunks!r:.80}: must be an object")
    known = chunks.get("original_max_position_embeddings") or chunks.get("chunk_size")
    warnings.warn(f"{_DUAL_CHUNKS} is not applied: attention is plain, which the model was trained for up to {known} "
                  "tokens", stacklevel=5)


def _rotary_layers(config: Mapping[str, Any]) -> list[bool]:
    """Which layers of SmolLM3 have RoPE: all but every fourth, or those whose entry of `no_rope_layers` is not 0."""
    layers, stride = config["num_hidden_layers"], config["no_rope_layer_interval"]
    found = config.get("no_rope_layers") or [(layer + 1) % stride != 0 for layer in range(layers)]
    if len(found) < layers or not any(found[:layers]):
        raise ValueError(f"no_rope_layers={found!r:.80}: must hold an entry for each of {layers} layers, not all 0")
    return [bool(turned) for turned in found[:layers]]


def _read_experts(config: Mapping[str, Any], family: str) -> ExpertsConfig | None:
    """Every layer of Mixtral has experts; of Qwen3-MoE those on the stride that are not listed as plain."""
    count, layers = config.get("num_local_experts") or config.get("num_experts"), config["num_hidden_layers"]
    if family == "mixtral":
        return ExpertsConfig(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"],
                             tuple(range(layers)), normalised=True)
    if family != "qwen3_moe":
        return None
    few, size = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
    if count is None or few is None or size is None:
        raise ValueError(f"config of a {family} model: num_experts={count}, num_experts_per_tok={few}, "
                         f"moe_intermediate_size={size}: must all be given")
    plain, stride = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    routed = tuple(i for i in range(layers) if i not in plain and (i + 1) % stride == 0)
    return ExpertsConfig(count, few, size, routed, normalised=bool(config.get("norm_topk_prob")))


def _read_windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: all of Mistral's and Phi-3's, those of Qwen where it is switched on."""
    window = config.get("sliding_window")
    if family in ("mistral", "mixtral", "phi3"):
        return (window,) * num_layers
    if not config.get("use_sliding_window") or window is None:
        return (None,) * num_layers
    if family == "qwen3_moe":
        return (window,) * num_layers
    first = config.get("max_window_layers", 28)
    full = _rotary_layers(config) if family == "smollm3" else [layer < first for layer in range(num_layers)]
    kinds = config.get("layer_types") or ["full_attention" if sees_all else "sliding_attention" for sees_all in full]
    return windows_of(kinds, window, num_layers)


def windows_of(kinds: list[str], window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer that `layer_types` calls sliding.

    Raises:
        ValueError: another number of layers, or another kind.
    """
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries: must be {num_layers}, one for each layer")
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layer_types {unknown} are not supported, only 'full_attention' and 'sliding_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
