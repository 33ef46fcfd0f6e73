"""Mutants of a model's files. Nothing seals these: what loads is a whole model, as its config says it is."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from gguf_files import ARRAY, FLAG, FLOAT, INT, SCALARS, STRING, field, gguf, tiny_fields, tiny_tensors
from goldens.tiny_models import CONFIGS, DEEPSEEK, GPT_CONFIGS, random_tensor
from mutants import each, mutants, mutated_bytes, mutated_json, read_or_refused
from safetensors.numpy import save_file

from lowrank_kv_jax import models
from lowrank_kv_jax.models.hf_checkpoint import open_hf_directory
from lowrank_kv_jax.models.load import load_model
from lowrank_kv_jax.models.parameters import param_table, stored_arrays

FAMILIES = CONFIGS | GPT_CONFIGS | DEEPSEEK


def whole(model):
    """Whether a loaded model is what its config says, and can be asked something."""
    infos = param_table(model.config)
    assert jax.tree.all(jax.tree.map(lambda info, x: info.shape == x.shape, infos, model.params))
    spec = model.config.attention
    assert spec.rope is None or np.isfinite(spec.rope.inverse_frequencies()).all()
    if model.tokenizer is not None:
        assert all(isinstance(i, int) for i in model.tokenizer.encode("a b"))
    return True


def write_tokenizer(path):
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers import models as kinds

    backend = Tokenizer(kinds.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "chat_template": "{{ messages }}", "model_max_length": 64}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model in two shards, with everything that is read."""
    path = tmp_path_factory.mktemp("model") / "whole"
    path.mkdir()
    config = CONFIGS["llama3.1"] | {"num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    infos = stored_arrays(models.read_config(config))
    tensors = {info.hf: random_tensor(info.hf, info.stored_shape) for info in infos}
    shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: x for name, x in tensors.items() if shards[name] == shard}, path / shard, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": shards}))
    write_tokenizer(path)
    return path


def safetensors_header(path, change):
    """The file with another header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "model-0.safetensors", "tokenizer.json",
         "tokenizer_config.json", "special_tokens_map.json")


@pytest.mark.parametrize("name", FILES)
@mutants
def test_a_model_directory(name, numbers, directory, tmp_path):
    def check(rng):
        path = shutil.copytree(directory, tmp_path / "own")
        try:
            file = path / name
            if rng.random() < 0.3:
                file.write_bytes(mutated_bytes(file.read_bytes(), rng))
            elif file.suffix == ".safetensors":
                safetensors_header(file, lambda header: mutated_json(header, rng))
            else:
                file.write_text(json.dumps(mutated_json(json.loads(file.read_text()), rng)))
            with read_or_refused(path):
                assert whole(load_model(path))
        finally:
            shutil.rmtree(path)

    each(numbers, check)


@mutants
def test_configs_of_every_family(numbers, tmp_path):
    def check(rng):
        content = mutated_json(FAMILIES[rng.choice(sorted(FAMILIES))], rng)
        (tmp_path / "config.json").write_text(json.dumps(content))
        with read_or_refused(tmp_path / "config.json"):  # what is still a config has no weights
            open_hf_directory(tmp_path)
        try:
            config = models.read_config(json.loads(json.dumps(content)))
        except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
            return  # the file is named where it is opened
        assert dataclasses.is_dataclass(config.attention) and hash(config) is not None
        assert config.rope is None or np.isfinite(config.rope.inverse_frequencies()).all()

    each(numbers, check)


# ---- GGUF ---------------------------------------------------------------------------------------------------------

_OTHERS = {
    STRING: ("", "x", "llama", "gpt2", "\ud800", "x" * 5000), INT: (0, 1, 2**31, 2**32 - 1), FLAG: (True, False),
    FLOAT: (0.0, -1.0, 1e38, float("nan"), float("inf")), 5: (-1, 0, 2**31 - 1), 12: (1e308, float("nan")), 11: (-1, 2**62),
    ARRAY: ((STRING, []), (INT, [0]), (STRING, ["x"] * 96), (FLOAT, [float("nan")] * 96), (ARRAY, [(INT, [1])])),
}


def mutated_gguf(rng):
    """The bytes of the tiny model with a field, an entry of the directory, or any bytes of it changed."""
    fields, (tensors, data) = tiny_fields(), tiny_tensors()
    kind = rng.choice(("bytes", "field", "field", "item", "out", "twice", "tensor", "tensor"))
    number = rng.randrange(len(fields))
    name, own, value = fields[number]
    if kind == "bytes":
        return mutated_bytes(gguf([field(*one) for one in fields], tensors, data), rng)
    if kind == "field":
        other = rng.choice((own, *_OTHERS))
        fields[number] = (name, other, rng.choice(_OTHERS[other]))
    elif kind == "item" and own == ARRAY:
        item, items = value
        items = list(items)
        items[rng.randrange(len(items))] = rng.choice(_OTHERS[item])
        fields[number] = (name, own, (item, items))
    elif kind == "out":
        del fields[number]
    elif kind == "twice":
        fields.append((f"llama.{rng.choice(('', 'rope.scaling.factor', 'rope.scaling.type', 'vocab_size', 'x'))}", own, value))
    else:
        at = rng.randrange(len(tensors))
        entry = list(tensors[at])
        entry[rng.randrange(4)] = rng.choice(("x", (1,), (0,), (2**63, 2), (48,) * 5, 0, 1, 2, 30, 32, 2**40, "blk.0.attn_q.weight"))
        kinds = (str, tuple, int, int)
        if all(isinstance(part, wanted) for part, wanted in zip(entry, kinds, strict=True)) and entry[2] < 2**32:
            tensors[at] = tuple(entry)
    return gguf([field(*one) for one in fields], tensors, data)


@mutants
def test_gguf(numbers, tmp_path):
    path = tmp_path / "x.gguf"

    def check(rng):
        path.write_bytes(mutated_gguf(rng))
        with read_or_refused(path):
            assert whole(load_model(path))

    each(numbers, check)


def test_the_files_that_are_damaged_are_whole(directory, tmp_path):
    assert whole(load_model(directory)) and set(_OTHERS) <= {STRING, ARRAY, *SCALARS}
    (tmp_path / "x.gguf").write_bytes(gguf([field(*one) for one in tiny_fields()], *tiny_tensors()))
    assert whole(load_model(tmp_path / "x.gguf"))
