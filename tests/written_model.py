"""A tiny model on disk, as a user has one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lowrank_kv_jax.models import read_config
from lowrank_kv_jax.models.parameters import stored_arrays

CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
}


GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024,
        "activation_function": "gelu_new"}
PYTHIA = {
    "model_type": "gpt_neox", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 1024, "rotary_pct": 0.25, "use_parallel_residual": True,
    "hidden_act": "gelu", "tie_word_embeddings": False,
}


def write_model(path: Path, config: Mapping[str, Any] = CONFIG):
    """An HF directory with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds

    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    for info in stored_arrays(read_config(dict(config))):
        normal = rng.normal(size=info.stored_shape) * info.stored_shape[-1] ** -0.5
        tensors[info.hf] = (normal if len(info.stored_shape) > 1 else np.ones(info.stored_shape)).astype(np.float32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(kinds.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
