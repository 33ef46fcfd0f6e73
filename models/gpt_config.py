"""Configuration of GPT-2 and GPT-NeoX (Pythia): layer norms, plain MLPs, learned positions or partial RoPE."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.config_attributes import refuse_unknown, token_ids
from lowrank_kv_jax.models.config_ranges import check_rope_entry

ACTIVATIONS = ("gelu", "gelu_new")
_ALIKE = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
"""Other names of the same function."""


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """A `ModelConfig` with layer norms (`norm_eps` is theirs), biases everywhere, and one key head for each query head.

    Attributes:
        learned_positions: positions are rows of a table that is added to the embedding (GPT-2); `rope` is then None.
        parallel_residual: attention and MLP read the same residual stream (GPT-NeoX).
        activation: of the MLP, "gelu" or its tanh approximation "gelu_new".
    """

    learned_positions: bool = False
    parallel_residual: bool = False
    activation: str = "gelu"

    def __post_init__(self):
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not supported; it must be one of {list(ACTIVATIONS)}")
        if self.learned_positions != (self.rope is None):
            raise ValueError("positions are either learned or rotary: give rope, or learned_positions")


_GPT2_REQUIRED = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
_GPT2_ATTRIBUTES = frozenset({
    "activation_function", "n_inner", "n_ctx", "layer_norm_epsilon",
    # nothing of inference: dropout, the initial values, and heads for classification
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "gradient_checkpointing", "n_special", "predict_special_tokens", "output_past",
    "_num_labels",
})
_GPT2_FIXED = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def read_gpt2(config: Mapping[str, Any]) -> GPTConfig:
    """Read the content of a GPT-2 `config.json`.

    Raises:
        ValueError: as `read_config`.
    """
    refuse_unknown(config, "gpt2", _GPT2_REQUIRED, _GPT2_ATTRIBUTES, _GPT2_FIXED)
    hidden, heads, layers = config["n_embd"], config["n_head"], config["n_layer"]
    return GPTConfig(
        family="gpt2", vocab_size=config["vocab_size"], hidden_size=hidden,
        intermediate_size=config.get("n_inner") or 4 * hidden, num_layers=layers, q_heads=heads, kv_heads=heads,
        head_dim=_head_dim("gpt2", hidden, heads), norm_eps=float(config.get("layer_norm_epsilon") or 1e-5), rope=None,
        context=config["n_positions"], windows=(None,) * layers,
        tie_embeddings=config.get("tie_word_embeddings") in (None, True),
        bos_id=config.get("bos_token_id"), eos_ids=token_ids(config.get("eos_token_id")),
        learned_positions=True, activation=_activation(config.get("activation_function") or "gelu_new"),
    )


def _activation(name: str) -> str:
    return _ALIKE.get(name, name) if isinstance(name, str) else name


_NEOX_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)
_NEOX_ATTRIBUTES = frozenset({
    "rotary_pct", "rotary_emb_base", "layer_norm_eps", "use_parallel_residual", "hidden_act",
    "attention_dropout", "hidden_dropout", "classifier_dropout", "attention_probs_dropout_prob",
})
_NEOX_FIXED = {"attention_bias": True}


def read_gpt_neox(config: Mapping[str, Any]) -> GPTConfig:
    """Read the content of a GPT-NeoX `config.json`.

    Raises:
        ValueError: as `read_config`.
    """
    refuse_unknown(config, "gpt_neox", _NEOX_REQUIRED, _NEOX_ATTRIBUTES, _NEOX_FIXED)
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = _head_dim("gpt_neox", hidden, heads)
    parallel = config.get("use_parallel_residual")
    return GPTConfig(
        family="gpt_neox", vocab_size=config["vocab_size"], hidden_size=hidden,
        intermediate_size=config["intermediate_size"], num_layers=layers, q_heads=heads, kv_heads=heads,
        head_dim=head_dim, norm_eps=float(config.get("layer_norm_eps") or 1e-5), rope=_neox_rope(config, head_dim),
        context=config["max_position_embeddings"], windows=(None,) * layers,
        tie_embeddings=bool(config.get("tie_word_embeddings")), bos_id=config.get("bos_token_id"),
        eos_ids=token_ids(config.get("eos_token_id")), parallel_residual=True if parallel is None else bool(parallel),
        activation=_activation(config.get("hidden_act") or "gelu"),
    )


def _head_dim(family: str, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"config of a {family} model: {heads} heads do not divide the hidden size {hidden}")
    return hidden // heads


def _neox_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """RoPE of the first `rotary_pct` of a head's channels; transformers 5 keeps it in `rope_parameters`."""
    entry = {key: value for key, value in (config.get("rope_parameters") or {}).items() if value is not None}
    check_rope_entry(entry)
    kind = entry.pop("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise ValueError(f"rope_type {kind!r} with scaling {config.get('rope_scaling')!r} is not supported in gpt_neox; "
                         "it must be 'default'")
    share = entry.pop("partial_rotary_factor", None) or config.get("rotary_pct") or 0.25
    theta = entry.pop("rope_theta", None) or config.get("rotary_emb_base") or config.get("rope_theta") or 10000.0
    if entry:
        raise ValueError(f"rope_parameters of a gpt_neox model: unknown {sorted(entry)}")
    return RopeSpec(float(theta), int(head_dim * share))
