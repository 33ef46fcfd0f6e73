"""Configuration of DeepSeek-V2 and -V2-Lite: latent attention (MLA) and a mixture of experts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import AttentionSpec, LatentSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import refuse_unknown, token_ids
from lowrank_kv_jax.models.config_ranges import check_rope_entry
from lowrank_kv_jax.models.experts_config import ExpertsConfig

LATENT_EPS = 1e-6
"""Of the norms inside of the attention, whatever `norm_eps` is: the published code leaves it at its default."""


@dataclasses.dataclass(frozen=True)
class DeepseekConfig(ModelConfig):
    """A `ModelConfig` whose cache holds latents: `kv_heads` is 1 and `head_dim` that of an absorbed key.

    Attributes:
        q_lora_rank: of the queries' down-projection, None where they are projected at once (V2-Lite).
        kv_lora_rank: of the latent.
        nope_head_dim, rope_head_dim: channels of a query head without and with RoPE.
        v_head_dim: channels of a value head.
        softmax_scale: factor on the logits, YaRN's `mscale_all_dim` squared included; that of whole heads by default.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    nope_head_dim: int = 128
    rope_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self):
        super().__post_init__()
        if self.kv_heads != 1 or self.head_dim != self.kv_lora_rank + self.rope_head_dim:
            raise ValueError(f"kv_heads={self.kv_heads}, head_dim={self.head_dim}: absorbed keys have one head of "
                             f"{self.kv_lora_rank + self.rope_head_dim} channels")

    @property
    def attention(self) -> AttentionSpec:
        scale = self.softmax_scale or (self.nope_head_dim + self.rope_head_dim) ** -0.5
        return dataclasses.replace(
            super().attention, latent=LatentSpec(self.kv_lora_rank, LATENT_EPS), softmax_scale=scale
        )


_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
)
_ATTRIBUTES = frozenset({
    "q_lora_rank", "first_k_dense_replace", "routed_scaling_factor", "topk_method", "n_group", "topk_group",
    "qk_head_dim",
    # nothing of inference: losses of the training, and how the published code is loaded and spread
    "aux_loss_alpha", "seq_aux", "ep_size", "auto_map",
})
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "norm_topk_prob": False, "moe_layer_freq": 1,
    "scoring_func": "softmax",
}
_METHODS = ("greedy", "group_limited_greedy")
_YARN_KEYS = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"}


def read_deepseek(config: Mapping[str, Any]) -> DeepseekConfig:
    """Read the content of a DeepSeek-V2 `config.json`.

    Raises:
        ValueError: as `read_config`.
    """
    refuse_unknown(config, "deepseek_v2", _REQUIRED, _ATTRIBUTES, _FIXED)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    nope, rotary, latent = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    if config.get("qk_head_dim") not in (None, nope + rotary):
        raise ValueError(f"qk_head_dim={config['qk_head_dim']}: must be qk_nope_head_dim + qk_rope_head_dim, "
                         f"{nope + rotary}")
    rope, magnitude, scale = _read_rope(config, rotary)
    return DeepseekConfig(
        family="deepseek_v2",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        q_heads=heads,
        kv_heads=1,
        head_dim=rotary + latent,
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=rope,
        context=config["max_position_embeddings"],
        windows=(None,) * layers,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")),
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=latent,
        nope_head_dim=nope,
        rope_head_dim=rotary,
        v_head_dim=config["v_head_dim"],
        rope_magnitude=magnitude,
        softmax_scale=scale * (nope + rotary) ** -0.5,
        moe=_read_experts(config),
    )


def _read_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    method = config.get("topk_method") or "greedy"
    if method not in _METHODS:
        raise ValueError(f"topk_method={method!r}: must be one of {list(_METHODS)}")
    limited, layers = method == "group_limited_greedy", config["num_hidden_layers"]
    return ExpertsConfig(
        count=config["n_routed_experts"],
        per_token=config["num_experts_per_tok"],
        size=config["moe_intermediate_size"],
        layers=tuple(range(min(int(config.get("first_k_dense_replace") or 0), layers), layers)),
        shared=config["n_shared_experts"],
        scale=float(config.get("routed_scaling_factor") or 1.0),
        groups=(config.get("n_group") or 1) if limited else 1,
        groups_per_token=(config.get("topk_group") or 1) if limited else 1,
    )


def _read_rope(config: Mapping[str, Any], rotary: int) -> tuple[RopeSpec, float, float]:
    """RoPE, the factor on rotated queries and keys, and the factor on the softmax scale.

    The last is that of the published code, mscale(factor, mscale_all_dim)^2. transformers applies it in its
    DeepSeek-V3 and (5.2) not in its DeepSeek-V2, which then computes another function than was trained.
    """
    entry = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    check_rope_entry(entry)
    legacy = entry.pop("type", None)
    scaling = entry.pop("rope_type", legacy) or "default"
    theta = float(entry.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    if scaling == "default":
        return RopeSpec(theta, rotary), 1.0, 1.0
    if scaling != "yarn":
        raise ValueError(f"rope_type {scaling!r} is not supported; it must be one of ['default', 'yarn']")
    values = {name: value for name, value in entry.items() if value is not None}
    missing = sorted({"factor", "original_max_position_embeddings"} - set(values))
    unknown = sorted(set(values) - _YARN_KEYS)
    if missing or unknown:
        raise ValueError(f"rope of type 'yarn': missing {missing}, unknown {unknown}")
    factor = float(values["factor"])
    every, some = float(values.get("mscale_all_dim") or 0), float(values.get("mscale") or 1)
    rope = RopeSpec(
        theta, rotary, "yarn", factor, original_context=int(values["original_max_position_embeddings"]),
        beta_fast=float(values.get("beta_fast") or 32), beta_slow=float(values.get("beta_slow") or 1),
    )
    return rope, _mscale(factor, some) / _mscale(factor, every), _mscale(factor, every) ** 2


def _mscale(factor: float, weight: float) -> float:
    """YaRN's temperature, 1 + 0.1 weight ln(factor)."""
    return 1.0 + 0.1 * weight * math.log(factor)
