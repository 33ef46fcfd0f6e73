"""The examples run as they stand, on a tiny model in the place of the real one."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import matplotlib
import pytest
from helpers import PLAIN
from suites import Loaded

import lowrank_kv_jax as lkv

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """What the examples load."""
    config = dataclasses.replace(PLAIN, context=2048)
    monkeypatch.setattr(lkv, "load_model", lambda source, dtype=None, mesh=None: Loaded(config))


def test_the_notebook(monkeypatch, capsys):
    matplotlib.use("Agg")
    cells = json.loads((FOLDER / "how_much_rank.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict = {}
    for source, cell in zip(code, (cell for cell in cells if cell["cell_type"] == "code"), strict=True):
        assert not cell["outputs"]
        exec(source, names)
        if cell["metadata"].get("tags") == ["parameters"]:
            assert names["MODEL"] == "smollm2-135m"
            names |= {"LENGTH": 192, "PREFIX": 128, "WINDOWS": 1, "RANKS": (0.5,)}
    shown = capsys.readouterr().out
    for spec in ("full", "static-pca-h:rank=0.5", "single-svd:rank=0.5"):
        assert f"{spec:28} " in shown
    assert "coefficients" in shown and "perplexity" in shown


def test_the_evaluation(monkeypatch, capsys, tmp_path):
    argv = ["evaluate.py", "--methods", "full", "streamingllm:keep=0.5", "--tasks", "niah_single_1", "--lengths", "1024",
            "--samples", "2", "--rows-per-device", "2", "--json", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(FOLDER / "evaluate.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("x smaller, mean score") == 2 and (tmp_path / "r.jsonl").read_text().count("\n") == 4
