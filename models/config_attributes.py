"""Attributes of an HF `config.json`: those of every family, those that say nothing, and one error for the rest."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from lowrank_kv_jax.models.config_ranges import out_of_range


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The ids of a config entry that may hold none, one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

_COMMON_ATTRIBUTES = frozenset(REQUIRED) | {
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
        "is_decoder",
        "output_router_logits",
        "router_aux_loss_coef",
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

    Of `rope_parameters` and `rope_scaling` one is read: they may not contradict each other.

    Args:
        required: attributes that must be positive integers.
        attributes: what the family has beside those of all.
        fixed: attributes with the only value that is implemented.
    """
    known = _COMMON_ATTRIBUTES | attributes | _IRRELEVANT | set(fixed) | set(required)
    problems = [f"{name} is missing" for name in required if config.get(name) is None]
    problems += out_of_range(config)
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    if isinstance(parameters, Mapping) and isinstance(scaling, Mapping):
        if any(parameters.get(name) != value for name, value in scaling.items()):
            problems.append("rope_parameters and rope_scaling say different things: leave one out")
    for name, value in config.items():
        if name not in known and value is not None:
            problems.append(f"{name:.80}={value!r:.80} is not known")
        elif name in fixed and value is not None and value != fixed[name]:
            problems.append(f"{name}={value!r:.80} is not supported, only {fixed[name]!r}")
    if problems:
        raise ValueError(f"config of a {family} model: " + "; ".join(problems))
