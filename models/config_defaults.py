"""What a `config.json` stands for where it leaves an attribute out: the defaults of transformers' config classes."""

from collections.abc import Mapping
from typing import Any

_WINDOW = {"sliding_window": 4096}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

# Beside those that null stands for as well, which the families' readers know.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": _TOKENS,
    "mistral": {"num_key_value_heads": 8} | _WINDOW | _TOKENS,
    "mixtral": {"num_key_value_heads": 8} | _TOKENS,
    "qwen2": {"num_key_value_heads": 32} | _WINDOW,
    "qwen3": {"num_key_value_heads": 32} | _WINDOW,
    "qwen3_moe": {"num_key_value_heads": 4} | _WINDOW,
    "phi3": {"original_max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000},
    "smollm3": {"num_key_value_heads": 4, "bos_token_id": 128000, "eos_token_id": 128001},
    "gemma2": _WINDOW | {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": 1,
    },
    "gemma3_text": _WINDOW | {"bos_token_id": 2, "eos_token_id": 1},
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
    "gpt_neox": {"bos_token_id": 0, "eos_token_id": 2},
    "gpt_oss": {"sliding_window": 128},
    "deepseek_v2": {"q_lora_rank": 1536} | _TOKENS,
}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what it leaves out; null stays null, and a token that the vocabulary has not is none."""
    vocabulary, defaults = config.get("vocab_size"), _LEFT_OUT[config["model_type"]]
    known = {name: value for name, value in defaults.items()
             if not (name in _TOKENS and isinstance(vocabulary, int) and value >= vocabulary)}
    return known | dict(config)
