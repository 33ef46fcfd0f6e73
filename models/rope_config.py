"""RoPE of the Llama-like families from `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (4)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config_ranges import check_rope_entry

# Of each kind what it needs; what it may have beside that is `_OPTIONAL`.
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": {"short_factor", "long_factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
_OPTIONAL = {"factor", "original_max_position_embeddings"}
_OPTIONAL_OF = {"longrope": {"attention_factor"}, "yarn": {"attention_factor", "beta_fast", "beta_slow", "truncate"}}
LLAMA_KINDS = ("default", "linear", "llama3")


class Rope(NamedTuple):
    """What a config says of positions.

    Attributes:
        rope: the rotary embedding.
        context: the longest sequence that the model was made for, in tokens.
        magnitude: factor on queries and keys after RoPE.
    """

    rope: RopeSpec
    context: int
    magnitude: float = 1.0


def read_rope(
    config: Mapping[str, Any], head_dim: int, kinds: tuple[str, ...] = LLAMA_KINDS, partial: bool = False
) -> Rope:
    """RoPE of a model: "linear" stretches `max_position_embeddings`, the others state the stretched one.

    Args:
        config: with `max_position_embeddings`; `partial_rotary_factor` says the share of a head's channels that rotate.
        head_dim: channels of a head.
        kinds: that the family has.
        partial: whether the family may rotate a share of the channels.

    Raises:
        ValueError: another kind, attributes that are missing, unknown or not numbers.
    """
    entry = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_condense_ratio"):  # the first LongChat checkpoints: positions divided by the ratio
        entry = {"rope_type": "linear", "factor": config["rope_condense_ratio"]}
    check_rope_entry(entry)
    legacy = entry.pop("type", None)
    scaling = entry.pop("rope_type", legacy) or "default"
    theta = float(entry.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    share = entry.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise ValueError(f"rope partial_rotary_factor={share}: partial_rotary_factor must be 1.0 in this family")
    if scaling == "su":  # what the first Phi-3 checkpoints call it
        scaling = "longrope"
    if scaling not in kinds:
        raise ValueError(f"rope_type {scaling!r} is not supported; it must be one of {sorted(kinds)}")
    values = {name: value for name, value in entry.items() if value is not None}
    optional = _OPTIONAL | _OPTIONAL_OF.get(scaling, set())
    missing, unknown = sorted(_KEYS[scaling] - set(values)), sorted(set(values) - _KEYS[scaling] - optional)
    if missing or unknown:
        raise ValueError(f"rope of type {scaling!r}: missing {missing}, unknown {unknown}")
    context, width = config["max_position_embeddings"], int(head_dim * share)
    if scaling == "longrope":
        return _longrope(config, values, theta, width)
    if scaling == "yarn":
        return _yarn(context, values, theta, width)
    factor = float(values.get("factor", 1.0))
    if scaling == "linear":
        return Rope(RopeSpec(theta, width, "linear", factor),
                    int(values.get("original_max_position_embeddings", context) * factor))
    if scaling == "llama3":
        bounds = float(values["low_freq_factor"]), float(values["high_freq_factor"])
        return Rope(RopeSpec(theta, width, "llama3", factor, *bounds, int(values["original_max_position_embeddings"])),
                    context)
    return Rope(RopeSpec(theta, width), context)


def _longrope(config: Mapping[str, Any], values: dict[str, Any], theta: float, width: int) -> Rope:
    """LongRoPE has divisors for texts within the original context and others for longer ones.

    A cache that grows from one into the other would hold keys of both. A model whose context is longer than the original
    one is read with the latter throughout, one whose is not with the former.
    """
    context = config["max_position_embeddings"]
    original = values.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or context
    if not original > 1:
        raise ValueError(f"original_max_position_embeddings={original}: must be above 1")
    stretched = float(values.get("factor") or context / original)
    magnitude = values.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    divisors = values["long_factor" if context > original else "short_factor"]
    return Rope(RopeSpec(theta, width, "longrope", divisors=tuple(map(float, divisors))), context, float(magnitude))


def _yarn(context: int, values: dict[str, Any], theta: float, width: int) -> Rope:
    """YaRN multiplies queries and keys by 1 + 0.1 ln(factor) unless it is told another factor."""
    factor = float(values["factor"])
    rope = RopeSpec(
        theta, width, "yarn", factor, original_context=int(values["original_max_position_embeddings"]),
        beta_fast=float(values.get("beta_fast") or 32), beta_slow=float(values.get("beta_slow") or 1),
        truncate=values.get("truncate", True),
    )
    magnitude = values.get("attention_factor")
    return Rope(rope, context, float(1 + 0.1 * math.log(factor) if magnitude is None else magnitude))
