"""Model configuration: one frozen dataclass for all Llama-like families, read from HF `config.json`."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from lowrank_kv_jax.models.config_ranges import check_rope_entry, out_of_range
from lowrank_kv_jax.rope import RopeSpec
from lowrank_kv_jax.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static description of a decoder, hashable by value. Nothing else decides what the decoder computes.

    Attributes:
        family: "llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "gpt2" or "gpt_neox"; kept for messages only.
        vocab_size: rows of the embedding.
        hidden_size: H, the width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: L.
        q_heads: N, a multiple of `kv_heads`.
        kv_heads: K.
        head_dim: D; N * D need not be H.
        norm_eps: epsilon of every RMS norm.
        rope: the rotary embedding, `None` where positions are learned.
        context: the longest sequence that the model was made for, in tokens.
        windows: sliding window of each layer in tokens, `None` where a layer sees everything.
        qkv_bias, o_bias, mlp_bias: whether these projections carry a bias.
        qk_norm: RMS norm of each q and k head before RoPE (Qwen3).
        tie_embeddings: the output head is the transposed embedding.
        bos_id: token that opens a sequence, `None` where the family has none.
        eos_ids: tokens that end a generation; may be empty.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec | None
    context: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "q_heads",
            "kv_heads",
            "head_dim",
            "context",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.context >= 2**31:
            raise ValueError(f"context must be at most {2**31 - 1}, got {self.context:.3g}")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads must be a multiple of kv_heads, got {self.q_heads} and {self.kv_heads}"
            )
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows must have one entry for each of the {self.num_layers} layers, "
                f"got {len(self.windows)}"
            )
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"a sliding window must be None or a positive integer, got {window!r}")

    @property
    def attention(self) -> AttentionSpec:
        """What a cache method may know of this model."""
        return AttentionSpec(
            num_layers=self.num_layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            context=self.context,
            windows=self.windows,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of an HF `config.json`.

        Args:
            config: the parsed file, spelled as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) do.

        Raises:
            ValueError: unsupported family, attributes that are missing or unknown (all are listed), or
                values that this decoder does not implement.
        """
        family = config.get("model_type")
        if family == "deepseek_v2":  # a subclass, in its own file
            from lowrank_kv_jax.models.deepseek_config import read_deepseek

            return read_deepseek(config)
        if family in ("gpt2", "gpt_neox"):
            from lowrank_kv_jax.models import gpt_config

            return gpt_config.read_gpt2(config) if family == "gpt2" else gpt_config.read_gpt_neox(config)
        if family not in _FAMILY_ATTRIBUTES:
            raise ValueError(
                f"model_type {family!r} is not supported; it must be one of "
                f"{sorted([*_FAMILY_ATTRIBUTES, 'deepseek_v2', 'gpt2', 'gpt_neox'])}"
            )
        refuse_unknown(config, family, _REQUIRED, _FAMILY_ATTRIBUTES[family], _FIXED_VALUES)
        num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or (128 if family == "qwen3" else config["hidden_size"] // heads)
        rope, context = _read_rope(config, head_dim)
        attention_bias = bool(config.get("attention_bias"))
        return cls(
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


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The ids of a config entry that may hold none, one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

_COMMON_ATTRIBUTES = frozenset(_REQUIRED) | {
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
}

_QWEN_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}

_FAMILY_ATTRIBUTES = {
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

# Attributes that say nothing about inference: bookkeeping, training, sampling defaults of old checkpoints.
_IRRELEVANT = frozenset(
    {
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "pretraining_tp",
        "pad_token_id",
        "unk_token_id",
        "_name_or_path",
        "name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "is_llama_config",
        "transformers.js_config",
        "unsloth_version",
        "unsloth_fixed",
        "max_sequence_length",
        "max_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "max_new_tokens",
        "repetition_penalty",
        "num_beams",
        "_commit_hash",
        "keys_to_ignore_at_inference",
        "task_specific_params",
    }
)


def refuse_unknown(
    config: Mapping[str, Any], family: str, required: Sequence[str], attributes: Set[str], fixed: Mapping[str, Any]
):
    """One error for all that the decoder would get wrong. An attribute set to null is unset.

    Args:
        required: attributes that must be positive integers.
        attributes: what the family has beside those of all.
        fixed: attributes with the only value that is implemented.
    """
    known = _COMMON_ATTRIBUTES | attributes | _IRRELEVANT | set(fixed) | set(required)
    problems = [f"{name} is missing" for name in required if config.get(name) is None]
    problems += out_of_range(config)
    for name, value in config.items():
        if name not in known and value is not None:
            problems.append(f"{name}={value!r} is not known")
        elif name in fixed and value is not None and value != fixed[name]:
            problems.append(f"{name}={value!r} is not supported, only {fixed[name]!r}")
    if problems:
        raise ValueError(f"config of a {family} model: " + "; ".join(problems))


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
