"""The Python of the README and of the docs runs as it stands, from top to bottom of a page."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import lowrank_kv_jax as lkv
from lowrank_kv_jax.estimators.estimator import ESTIMATORS
from lowrank_kv_jax.method import REGISTRY
from lowrank_kv_jax.models import load_model, read_config
from lowrank_kv_jax.models.parameters import param_table

ROOT = Path(__file__).parents[1]
FEWER_WINDOWS = """
import functools, lowrank_kv_jax as lkv
lkv.calibrate = functools.partial(lkv.calibrate, length=512, windows=1)  # the blocks leave both at their defaults
"""
OUTCOME = """
assert out.tokens[0] and more.tokens[0] and used.total > 0
assert int(more.cache.length[0]) > int(out.cache.length[0])
assert lkv.load_cache("talk", method, model, bases=bases).length == out.cache.length
print(out.texts[0] + more.texts[0])
"""


def python_of(page: str) -> list[str]:
    """The blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_readme_runs_on_the_real_model(tmp_path):
    (block,) = python_of("README.md")
    assert block in python_of("docs/quick-start.md")
    code = "\n".join([FEWER_WINDOWS, block, OUTCOME])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


# ---- the docs, on a model of two layers in the place of the real one ----------------------------------------------

CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
}


def write_model(path: Path):
    """An HF directory with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds

    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    rng, tensors = np.random.default_rng(0), {}
    for info in jax.tree.leaves(param_table(read_config(CONFIG))):
        normal = rng.normal(size=info.stored_shape) * info.stored_shape[-1] ** -0.5
        tensors[info.hf] = (normal if len(info.stored_shape) > 1 else np.ones(info.stored_shape)).astype(np.float32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(kinds.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder with `my-llama`, which also stands for the model that comes along; what a page registers goes again."""
    write_model(tmp_path / "my-llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lkv, "load_model", lambda source, **given: load_model("my-llama", **given))
    monkeypatch.setattr(lkv, "calibrate", functools.partial(lkv.calibrate, length=512, windows=1))
    known = [(table, dict(table)) for table in (REGISTRY, ESTIMATORS)]
    yield
    for table, before in known:
        table.clear()
        table.update(before)


def run_page(page: str) -> dict:
    names: dict = {"__name__": "page"}
    for i, block in enumerate(python_of(page)):
        exec(compile(block, f"{page}, block {i + 1}", "exec"), names)
    return names


def test_quick_start(shelf):
    names = run_page("docs/quick-start.md")
    assert int(names["same"].length[0]) == int(names["out"].cache.length[0])
    assert names["one"].layout.batch == 1 and names["logits"].shape == (2, 256)
    assert lkv.spell_method(names["smaller"]) == "kivi:bits=4+kvzip:keep=0.25"


def test_extending(shelf, capsys):
    names = run_page("docs/extending.md")
    assert REGISTRY["long-keys"] is names["LongKeys"] and REGISTRY["float8"] is names["Float8"]
    assert ESTIMATORS["power"] is names["PowerIteration"]
    said = capsys.readouterr().out
    assert all(spec in said for spec in ("kivi:bits=8+long-keys:keep=0.5+moments", "float8+snapkv:keep=0.5"))


def test_own_model(shelf):
    names = run_page("docs/own-model.md")
    assert names["out"].tokens[0] and names["seen"].out.shape == (1, 1, 4, 16)
    assert np.isfinite(np.asarray(names["seen"].out)).all()
