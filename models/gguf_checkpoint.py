"""GGUF files as checkpoints: the config from the metadata, the tensors in HF order."""

import dataclasses
from typing import Any

import numpy as np

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.convert import Checkpoint
from lowrank_kv_jax.models.gguf_file import GgufFile
from lowrank_kv_jax.models.hf_config import read_config
from lowrank_kv_jax.models.stored import StoredTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files state "llama"

# architecture key -> attribute of an HF config
_ATTRIBUTES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_ROPE_KEYS = {
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
_OTHER_KEYS = {"attention.value_length", "tensor_data_layout"}


def open_gguf(file: GgufFile) -> Checkpoint:
    """The checkpoint in a GGUF file.

    Raises:
        ValueError: an architecture, key or value that the decoder does not implement; unknown keys are all
            listed.
    """
    config = _with_divisors(file, read_config(_hf_config(file)))
    tensors = dict(file.tensors)
    if file.metadata["general.architecture"] == "llama":
        tensors = {name: _with_heads(name, tensor, config) for name, tensor in tensors.items()}
    return Checkpoint(str(file.path), config, tensors, naming="gguf")


def _with_heads(name: str, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
    """llama's converter interleaves the rotary halves of q and k; note it, so that reading undoes it."""
    for part, heads in ((".attn_q.", config.q_heads), (".attn_k.", config.kv_heads)):
        if part in name and tensor.shape[0] == heads * config.head_dim:
            return dataclasses.replace(tensor, interleaved_heads=heads)
    return tensor


_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<EOT>"})
"""Texts of tokens that end a turn, of which older files do not say so."""


def _hf_config(file: GgufFile) -> dict[str, Any]:
    """The metadata in the spelling of an HF config."""
    metadata, tensors = file.metadata, file.tensors
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{file.path}: split.count={parts}: must be 1; this is a part of a model, which "
                         "`llama-gguf-split --merge` makes one file of")
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {architecture!r} is not supported; it must be one of "
            f"{list(ARCHITECTURES)}"
        )
    keys = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    known = {*_ATTRIBUTES, *_ROPE_KEYS, *_OTHER_KEYS}
    if keys.get("attention.causal") is False:
        raise ValueError(f"{file.path}: {architecture}.attention.causal=False: must be true, the decoder is causal")
    # zeros and empty values switch a feature off
    if unknown := [f"{architecture}.{key}={keys[key]!r}" for key in keys if key not in known and keys[key]]:
        raise ValueError(f"{file.path}: unknown metadata: " + "; ".join(unknown))
    if lists := [key for key in _ATTRIBUTES if isinstance(keys.get(key), list)]:
        raise ValueError(f"{file.path}: values that differ by layer are not supported: {lists}")
    if texts := [f"{architecture}.{key}={keys[key]!r:.80}" for key in _ATTRIBUTES if isinstance(keys.get(key), str)]:
        raise ValueError(f"{file.path}: {texts[0]}: must be a number")
    if (
        not 0 < keys.get("block_count", 1) <= len(tensors)
    ):  # a corrupt count must not become a table of that size
        raise ValueError(
            f"{file.path}: block_count is {keys['block_count']}, but there are {len(tensors)} tensors"
        )
    config = {name: keys[key] for key, name in _ATTRIBUTES.items() if key in keys}
    config.setdefault("num_key_value_heads", None)  # a file that does not say has one for each query head
    config.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None)
    config["model_type"] = (
        "mistral" if architecture == "llama" and "sliding_window" in config else architecture
    )
    if "rms_norm_eps" in config:  # stored in float32: 9.999999747e-06 stands for 1e-05
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    if architecture != "qwen2" and "blk.0.attn_q.bias" in tensors:
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in tensors:
        config["mlp_bias"] = True
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [token for token, text in enumerate(metadata.get("tokenizer.ggml.tokens", ())) if text in _TURN_ENDS]
    config["eos_token_id"] = list(dict.fromkeys(token for token in ends if token is not None))
    config["rope_parameters"] = _rope(file, keys, config)
    return config


def _rope(file: GgufFile, keys: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.get(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {key} is {keys[key]}, it must equal the head_dim of {head_dim}")
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{file.path}: rope.scaling.type {kind!r} is not supported, only 'none' and 'linear'"
        )
    if factor and factor != 1.0 and (kind == "linear" or "rope.scaling.type" not in keys):
        original = keys.get("rope.scaling.original_context_length")
        return {"rope_type": "linear", "factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "default"}


def _with_divisors(file: GgufFile, config: ModelConfig) -> ModelConfig:
    """The config with the divisors of its frequencies that the file holds; a linear factor divides them besides, as in
    llama.cpp.

    Llama 3.1 files hold the divisor of each frequency, not the rule; recover the rule and verify it. Every release of 3.1
    to 3.3 has factors 1 and 4 and an original context of 8192; only `factor` differs.
    """
    tensor, rope = file.tensors.get("rope_freqs.weight"), config.rope
    if tensor is None or rope is None:
        return config
    divisors = np.concatenate([values for _, values in tensor.slabs()]).astype(np.float64)
    if np.all(divisors == 1.0):
        return config
    factor = float(divisors.max())
    rule = RopeSpec(rope.theta, rope.rotary_dim, "llama3", factor, 1.0, 4.0, 8192)
    expected = RopeSpec(rope.theta, rope.rotary_dim).inverse_frequencies() / rule.inverse_frequencies()
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{tensor.path}: rope_freqs.weight does not follow Llama 3.1's rule with factor {factor}, "
            "low_freq_factor 1, high_freq_factor 4 and an original context of 8192"
        )
    if rope.scaling == "linear":
        both = tuple((expected * rope.factor).tolist())
        rule = RopeSpec(rope.theta, rope.rotary_dim, "longrope", divisors=both)
    return dataclasses.replace(config, rope=rule)
