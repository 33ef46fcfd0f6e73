"""Configurations of the text models of Gemma 3."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import REQUIRED, refuse_unknown, token_ids
from lowrank_kv_jax.models.llama_config import windows_of
from lowrank_kv_jax.models.rope_config import read_rope

_ATTRIBUTES = {
    "layer_types", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping", "cache_implementation",
    "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern",
}
_FIXED = {
    "attn_logit_softcapping": None,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "use_bidirectional_attention": False, "is_encoder_decoder": False,
}
_KINDS = ("default", "linear")


def read_gemma(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Gemma model from the content of its `config.json`.

    Raises:
        ValueError: as `read_config`.
    """
    family = config["model_type"]
    refuse_unknown(config, family, REQUIRED, _ATTRIBUTES, _FIXED)
    config = {"rope_theta": 1e6} | {name: value for name, value in config.items() if value is not None}
    layers, heads, head_dim = config["num_hidden_layers"], config["num_attention_heads"], config.get("head_dim", 256)
    stride = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % stride else "full_attention" for layer in range(layers)
    ]
    windows = windows_of(kinds, config.get("sliding_window", 4096), layers)
    by_kind = _read_ropes(config, family, head_dim)
    ropes = tuple(by_kind[kind] for kind in kinds)
    return ModelConfig(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        q_heads=heads,
        kv_heads=config.get("num_key_value_heads") or 4,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=ropes[-1],
        context=config["max_position_embeddings"],
        windows=windows,
        qk_norm=True,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")),
        softmax_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        ropes=ropes if len(set(ropes)) > 1 else None,
        output_cap=config.get("final_logit_softcapping"),
        norm_offset=1.0,
        post_norms=True,
        mlp_activation="gelu_tanh",
        embed_scale=float(config["hidden_size"]) ** 0.5,
    )


def _read_ropes(config: Mapping[str, Any], family: str, head_dim: int) -> dict[str, Any]:
    """RoPE by kind of layer: that of sliding windows has a theta of its own and is not scaled.

    transformers 5 nests an entry for each kind in `rope_parameters`.
    """
    found = config.get("rope_parameters") or {}
    if found and not set(found) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters of a {family} model: must hold 'full_attention' and 'sliding_attention', got "
                         f"{sorted(found)}")
    local = {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
    entries = {"full_attention": found.get("full_attention") or config.get("rope_scaling") or {},
               "sliding_attention": local | (found.get("sliding_attention") or {})}
    return {
        kind: read_rope(config | {"rope_parameters": entry or {"rope_type": "default"}}, head_dim, _KINDS).rope
        for kind, entry in entries.items()
    }
