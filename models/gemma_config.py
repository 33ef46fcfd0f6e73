"""Configurations of Gemma 2 and of the text models of Gemma 3."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import REQUIRED, refuse_unknown, token_ids
from lowrank_kv_jax.models.llama_config import windows_of
from lowrank_kv_jax.models.rope_config import read_rope

_COMMON = {
    "layer_types", "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "cache_implementation",
}
_ATTRIBUTES = {
    "gemma2": _COMMON,
    "gemma3_text": _COMMON | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
}
_FIXED = {
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "use_bidirectional_attention": False, "is_encoder_decoder": False,
}
_SCALINGS = ("default", "linear")


def read_gemma(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Gemma model from the content of its `config.json`.

    Raises:
        ValueError: as `read_config`.
    """
    family = config["model_type"]
    refuse_unknown(config, family, REQUIRED, _ATTRIBUTES[family], _FIXED)
    values = {name: value for name, value in config.items() if value is not None}
    layers, heads, head_dim = config["num_hidden_layers"], config["num_attention_heads"], values.get("head_dim", 256)
    stride = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or 6
    stride = 2 if family == "gemma2" else stride
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % stride else "full_attention" for layer in range(layers)
    ]
    windows = windows_of(kinds, values.get("sliding_window"), layers)
    by_kind = _read_ropes(values, head_dim)
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
        qk_norm=family == "gemma3_text",
        tie_embeddings=bool(values.get("tie_word_embeddings", True)),
        bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")),
        softmax_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        ropes=ropes if len(set(ropes)) > 1 else None,
        logit_cap=values.get("attn_logit_softcapping") if family == "gemma2" else None,  # transformers caps no others
        output_cap=values.get("final_logit_softcapping"),
        norm_offset=1.0,
        post_norms=True,
        mlp_activation="gelu_tanh",
        embed_scale=float(config["hidden_size"]) ** 0.5,
    )


def _read_ropes(values: dict[str, Any], head_dim: int) -> dict[str, RopeSpec]:
    """RoPE by kind of layer: one in Gemma 2; in Gemma 3 that of sliding windows has a theta of its own and no scaling.

    transformers 5 nests an entry for each kind in `rope_parameters` of Gemma 3.
    """
    found, kinds = values.get("rope_parameters") or {}, ("full_attention", "sliding_attention")
    if values["model_type"] == "gemma2":
        return dict.fromkeys(kinds, read_rope(values, head_dim, _SCALINGS).rope)
    if not set(found) <= set(kinds):
        raise ValueError(f"rope_parameters of a gemma3_text model: must hold {' and '.join(map(repr, kinds))}, got "
                         f"{sorted(found)}")
    entries = {
        "full_attention": {"rope_theta": values.get("rope_theta", 1e6)}
        | (found.get("full_attention") or values.get("rope_scaling") or {}),
        "sliding_attention": {"rope_theta": values.get("rope_local_base_freq", 10000.0)}
        | (found.get("sliding_attention") or {}),
    }
    return {
        kind: read_rope(values | {"rope_parameters": entry}, head_dim, _SCALINGS).rope for kind, entry in entries.items()
    }
