"""Configurations of Llama, Mistral, Qwen2 and Qwen3."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import REQUIRED, refuse_unknown, token_ids
from lowrank_kv_jax.models.config_ranges import check_rope_entry

_QWEN_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}

FAMILY_ATTRIBUTES = {
    "llama": {"attention_bias", "mlp_bias", "rope_condense_ratio"},
    "mistral": {"sliding_window"},
    "qwen2": _QWEN_WINDOW,
    "qwen3": _QWEN_WINDOW | {"attention_bias"},
}

# Attributes that change what is computed, each with the only value that the decoder implements.
_FIXED_VALUES = {
    "hidden_act": "silu",
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
}


def read_llama(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Llama-like model from the content of its `config.json`.

    Raises:
        ValueError: as `read_config`.
    """
    family = config["model_type"]
    refuse_unknown(config, family, REQUIRED, FAMILY_ATTRIBUTES[family], _FIXED_VALUES)
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else config["hidden_size"] // heads)
    rope, context = _read_rope(config, head_dim)
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
        rope=rope,
        context=context,
        windows=_read_windows(config, family, num_layers),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family == "qwen3",
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")),
    )


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _read_rope(config: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, int]:
    """RoPE and context: "linear" stretches `max_position_embeddings`, "llama3" states the stretched one."""
    entry = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_condense_ratio"):  # the first LongChat checkpoints: positions divided by the ratio
        entry = {"rope_type": "linear", "factor": config["rope_condense_ratio"]}
    check_rope_entry(entry)
    legacy = entry.pop("type", None)
    scaling = entry.pop("rope_type", legacy) or "default"
    theta = float(entry.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    context = config["max_position_embeddings"]
    if entry.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ValueError("rope: partial_rotary_factor must be 1.0 in these families")
    if scaling not in _ROPE_KEYS:
        raise ValueError(f"rope_type {scaling!r} is not supported; it must be one of {sorted(_ROPE_KEYS)}")
    values = {name: value for name, value in entry.items() if value is not None}
    missing = sorted(_ROPE_KEYS[scaling] - set(values))
    unknown = sorted(set(values) - _ROPE_KEYS[scaling] - {"factor", "original_max_position_embeddings"})
    if missing or unknown:
        raise ValueError(f"rope of type {scaling!r}: missing {missing}, unknown {unknown}")
    if scaling == "default":
        return RopeSpec(theta, head_dim), context
    factor = float(values["factor"])
    if scaling == "linear":
        rope = RopeSpec(theta, head_dim, "linear", factor)
        return rope, int(values.get("original_max_position_embeddings", context) * factor)
    return RopeSpec(
        theta,
        head_dim,
        "llama3",
        factor,
        float(values["low_freq_factor"]),
        float(values["high_freq_factor"]),
        int(values["original_max_position_embeddings"]),
    ), context


def _read_windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: all of Mistral's, the upper ones of Qwen where it is switched on."""
    window = config.get("sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    if family == "llama" or not config.get("use_sliding_window") or window is None:
        return (None,) * num_layers
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries: must be {num_layers}, one for each layer")
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layer_types {unknown} are not supported, only 'full_attention' and 'sliding_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
