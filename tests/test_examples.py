"""The examples run as they stand, on a tiny model in the place of the real one."""

import dataclasses
import functools
import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, prompts
from suites import Loaded

import lowrank_kv_jax as lkv
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.testing import exact_configuration

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """What the examples load."""
    config = dataclasses.replace(PLAIN, context=2048)
    monkeypatch.setattr(lkv, "load_model", lambda source, dtype=None, mesh=None: Loaded(config))


NOTEBOOKS = {  # by name: what is smaller in the tests, and what is shown
    "how_much_rank": ({"LENGTH": 192, "PREFIX": 128, "WINDOWS": 1, "RANKS": (0.5,)},
                      ("static-pca-h:rank=0.5 ", "single-svd:rank=0.5 ", "coefficients", "perplexity")),
    "compare_methods": ({"LENGTH": 192, "PREFIX": 128, "SPECS": ("full", "kivi:bits=4", "adakv:keep=0.5,recent=8")},
                        ("full ", "adakv:keep=0.5,recent=8 ", "x smaller", "Cache: adakv:")),
    "add_a_method": ({"LENGTH": 192, "PREFIX": 128}, ("loud-values:keep=0.25,sinks=4+moments ", "Generation from a Cache: ")),
    "your_own_model": ({"LAYERS": 2, "WIDTH": 32, "PROMPT": 64, "STEPS": 18, "METHODS": ("snapkv:keep=0.5",)},
                       ("snapkv:keep=0.5 ", "LayerCache: snapkv:")),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow) if name != "your_own_model" else name for name in NOTEBOOKS])
def test_notebooks_run(name):
    """Every one that there is, on the tiny model; what they show on the real one is stored in them."""
    run_cells = runpy.run_path(str(FOLDER / "run_notebooks.py"))["run_cells"]
    cells, (given, words) = cells_of(name), NOTEBOOKS[name]
    known = dict(REGISTRY)
    try:
        shown = json.dumps(run_cells(cells, given), ensure_ascii=False)
    finally:
        REGISTRY.clear()
        REGISTRY.update(known)
    assert all(word in shown for word in words) and ("image/png" in shown) == (name != "add_a_method")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    stored = json.dumps([cell["outputs"] for cell in code])
    assert "error" not in [output["output_type"] for cell in code for output in cell["outputs"]] and len(stored) < 250_000
    assert "smaller" in stored


def test_all_notebooks_are_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)
    assert all('MODEL = "smollm2-135m"' in str(cells_of(name)) for name in NOTEBOOKS if name != "your_own_model")


def cells_of(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_the_evaluation(monkeypatch, capsys, tmp_path):
    argv = ["evaluate.py", "--methods", "full", "streamingllm:keep=0.5", "--tasks", "niah_single_1", "--lengths", "1024",
            "--samples", "2", "--rows-per-device", "2", "--json", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(FOLDER / "evaluate.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("x smaller, mean score") == 2 and (tmp_path / "r.jsonl").read_text().count("\n") == 4


# ---- decoders of one's own: at full rank and budget each token is what the decoder says without a cache ---------------

TAPS_ALONE = {"transform": "transform:bits=none,metric=attention,sampled=False"}  # the default reads the whole model
EVERY_ONE = [TAPS_ALONE.get(name, lkv.spell_method(exact_configuration(REGISTRY[name]))) for name in sorted(REGISTRY)]
BESIDES = [  # with few exact tokens, so that some are coded
    "ojakv:rank=1.0,rope=pre,sinks=4,recent=8+snapkv:keep=1.0,recent=8", "xkv:rank=1.0,group=2,sinks=4,recent=8",
    "h2o:keep=1.0+moments",
]
LENGTHS, STEPS = (48, 37), 24


def logits_through_a_cache(own, method, params, tokens):
    """Of the prompt's last tokens and of those that come after, `[B, 1 + STEPS, V]`, a few at a time."""
    lengths = jnp.asarray(LENGTHS)
    plans = own["plan"](method, params, tokens[:, :48], prompt=48, capacity=48 + STEPS, dtype="float32")
    caches, logits = own["prefill"](params, plans, tokens[:, :48], lengths)
    seen, at = [logits], 48
    for width in (1,) * 16 + (8,) if method in BESIDES else (8, 8, 8):
        if at == 64:
            caches = own["refresh"](plans, caches)
        caches, logits = own["extend"](params, plans, caches, tokens[:, at : at + width])
        seen, at = [*seen, logits], at + width
    return np.concatenate(seen, axis=1)


@functools.cache
def parts(file):
    """What the example defines, weights, texts, and the logits of the texts as a whole, `[B, 1 + STEPS, V]`: behind a
    shorter prompt the tokens follow at once."""
    own = decoder(file)
    params, tokens = own["init"](jax.random.key(0)), prompts(length=48 + STEPS)
    index = np.stack([[*range(n), *range(48, 48 + STEPS), *range(48 - n)] for n in LENGTHS])
    logits = jax.jit(own["read"])(params, jnp.take_along_axis(tokens, index, axis=1))[0]
    return own, params, tokens, np.stack([logits[row, n - 1 : n + STEPS] for row, n in enumerate(LENGTHS)])


def of_both_decoders():
    """With the one what has few exact tokens, with its twin in Flax NNX the full cache; all others are run
    under -m slow."""
    for file in ("own_model.py", "own_model_nnx.py"):
        for method in (*EVERY_ONE, *BESIDES):
            quick = method.split(":")[0] == "kivi" if file == "own_model.py" else method == "full"
            yield pytest.param(file, method, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize("file, method", [*of_both_decoders()])
def test_a_decoder_of_ones_own_is_exact(file, method):
    own, params, tokens, expected = parts(file)
    np.testing.assert_allclose(logits_through_a_cache(own, method, params, tokens), expected, atol=2e-4)


@functools.cache
def decoder(file):
    return runpy.run_path(str(FOLDER / file))


@pytest.mark.parametrize("file", ["own_model.py", pytest.param("own_model_nnx.py", marks=pytest.mark.slow)])
def test_a_decoder_of_ones_own_decodes(file, capsys):
    decoder(file)["main"](["--method", "ojakv:rank=0.5", "--tokens", "20"])
    said, size = capsys.readouterr().out.splitlines()
    assert len(json.loads(said)) == 20 and size.startswith("ojakv:rank=0.5: ")
