"""Configuration of gpt-oss: sink logits, sliding windows in every other layer, YaRN, experts that are clamped."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import REQUIRED, refuse_unknown, token_ids
from lowrank_kv_jax.models.experts_config import ExpertsConfig
from lowrank_kv_jax.models.llama_config import windows_of
from lowrank_kv_jax.models.rope_config import read_rope

_ATTRIBUTES = frozenset({
    "sliding_window", "layer_types", "attention_bias", "num_local_experts", "num_experts_per_tok", "swiglu_alpha",
    "swiglu_limit", "quantization_config",
    # other names of what `num_experts_per_tok` and the RoPE say
    "experts_per_token", "initial_context_length",
})
_FIXED = {"hidden_act": "silu", "is_encoder_decoder": False}
# What a config stands for where it does not say, or says null; see `config_defaults`.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "num_local_experts": 128,
    "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read_gpt_oss(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a gpt-oss model from the content of its `config.json`.

    Raises:
        ValueError: as `read_config`; weights that are quantised otherwise than published.
    """
    refuse_unknown(config, "gpt_oss", REQUIRED, _ATTRIBUTES, _FIXED)
    _check_quantisation(config.get("quantization_config"))
    config = _DEFAULTS | {name: value for name, value in config.items() if value is not None}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_scaling"] = _YARN
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    rope = read_rope(config, config["head_dim"], ("default", "yarn"))
    return ModelConfig(
        family="gpt_oss",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        q_heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        norm_eps=float(config["rms_norm_eps"]),
        rope=rope.rope,
        context=rope.context,
        windows=windows_of(kinds, config.get("sliding_window"), layers),
        qkv_bias=bool(config["attention_bias"]),
        o_bias=bool(config["attention_bias"]),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")),
        rope_magnitude=rope.magnitude,
        moe=ExpertsConfig(
            config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"],
            tuple(range(layers)), normalised=True, biases=True,
            clamp=(float(config["swiglu_alpha"]), float(config["swiglu_limit"])),
        ),
        sink_logits=True,
    )


def _check_quantisation(entry: Any) -> None:
    """Raise ValueError where weights are quantised, and not to MXFP4."""
    method = entry.get("quant_method") if isinstance(entry, dict) else entry
    if entry is not None and method != "mxfp4":
        raise ValueError(f"quantization_config: quant_method={short(method)} is not read, only 'mxfp4'; load a "
                         "checkpoint that was dequantised to bfloat16")
