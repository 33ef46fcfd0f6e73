"""What the numbers and flags of a `config.json` may be, whatever the family."""

import math
from collections.abc import Mapping
from typing import Any

_SIZE, _FEW = 2**31 - 1, 2**16  # of dimensions and positions, which are 32 bits wide; of layers, heads, experts

# Bounds are met; null is as good as not there.
_INTEGERS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "max_position_embeddings",
                     "n_positions", "sliding_window", "moe_intermediate_size", "original_max_position_embeddings"),
                    (1, _SIZE)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim", "kv_lora_rank", "q_lora_rank",
                     "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "num_experts_per_tok",
                     "n_shared_experts", "n_group", "topk_group", "num_experts", "num_local_experts",
                     "decoder_sparse_step", "no_rope_layer_interval", "sliding_window_pattern",
                     "_sliding_window_pattern"), (1, _FEW)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, 4096)),
    **dict.fromkeys(("max_window_layers", "first_k_dense_replace"), (0, _SIZE)),
    "bos_token_id": (0, _SIZE),
}
_NUMBERS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (0.0, 1.0)),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "query_pre_attn_scalar"), (1.0, math.inf)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (1.0, math.inf)),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), (0.0, 1.0)),
    "rope_condense_ratio": (1.0, math.inf), "routed_scaling_factor": (0.0, math.inf),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), (0.0, math.inf)),
}
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_parallel_residual",
          "norm_topk_prob")
_LISTS = {"layer_types": (str, "strings"), "mlp_only_layers": (int, "integers"), "no_rope_layers": (int, "integers")}
_OBJECTS = ("rope_scaling", "rope_parameters")


def out_of_range(config: Mapping[str, Any]) -> list[str]:
    """A problem for each attribute that is not what it must be."""
    problems = []
    for name, value in config.items():
        allowed = None if value is None else _violated(name, value)
        if allowed:
            problems.append(f"{name}={value!r:.80} is not {allowed}")
    return problems


def _violated(name: str, value: Any) -> str | None:
    """What is allowed, where the value is not."""
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if fits else f"an integer in {low}..{high}"
    if name in _NUMBERS:
        low, high = _NUMBERS[name]
        fits = is_number(value) and low <= value <= high
        return None if fits else f"a finite number in {low:g}..{high:g}"
    if name in _FLAGS:
        return None if isinstance(value, bool) or value in (0, 1) else "true or false"
    if name in _OBJECTS:
        return None if isinstance(value, dict) else "an object"
    if name == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        fits = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _SIZE for i in ids)
        return None if fits else f"an integer in 0..{_SIZE}, or a list of these"
    if name in _LISTS:
        kind, plural = _LISTS[name]
        return None if isinstance(value, list) and all(isinstance(x, kind) for x in value) else f"a list of {plural}"
    return None


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of JSON."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**1023


_ROPE = {"original_max_position_embeddings": (1, _SIZE), "partial_rotary_factor": (0, 1), "mscale": (0, 100),
         "mscale_all_dim": (0, 100)}
"""Those that enter `RopeSpec` as they are have their bounds there."""


def check_rope_entry(entry: Mapping[str, Any]) -> None:
    """Raise ValueError for the first attribute of `rope_scaling` or `rope_parameters` of another type than it has."""
    for name, value in entry.items():
        fits, allowed = is_number(value), "be a finite number"
        if name in ("type", "rope_type"):
            fits, allowed = isinstance(value, str), "be a string"
        elif name == "truncate":
            fits, allowed = isinstance(value, bool), "be true or false"
        elif name in ("short_factor", "long_factor"):
            fits, allowed = isinstance(value, list) and all(map(is_number, value)), "be a list of finite numbers"
        elif name in _ROPE and fits:
            low, high = _ROPE[name]
            fits, allowed = low <= value <= high, f"lie in {low}..{high}"
        if value is not None and not fits:
            raise ValueError(f"rope {name:.80}={value!r:.80}: must {allowed}")
