"""`lowrank-kv inspect`."""

import json

import pytest
from suites import Loaded

from lowrank_kv_jax.cli import main


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args, **kwargs: Loaded())
    monkeypatch.setattr("lowrank_kv_jax.cli.compilation_cache.enable_compilation_cache", lambda: None)


def test_a_prompt_is_drawn_and_tabled(tiny, tmp_path, capsys):
    (tmp_path / "text").write_text("what a cache remembers " * 6)
    out, record = tmp_path / "held.png", tmp_path / "r.jsonl"
    argv = ["inspect", "--prompt-file", str(tmp_path / "text"), "--method", "streamingllm:keep=0.25", "--out", str(out)]
    assert main([*argv, "--json", str(record)]) == 0
    shown = capsys.readouterr().out
    assert "streamingllm:keep=0.25: what tiny holds of 138 tokens" in shown and f"drew {out}" in shown
    (found,) = map(json.loads, record.read_text().splitlines())
    assert found["method"] == "streamingllm:keep=0.25" and len(found["layers"]) == 3
    assert [(row["exact"], row["coded"], row["gone"]) for row in found["layers"]] == [(34, 0, 104)] * 3
    assert all(0 < row["attention"] < 1 for row in found["layers"]) and out.stat().st_size > 10_000


def test_it_is_drawn_into_the_working_directory(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "--prompt", "a b c d", "--heads"]) == 0
    assert (tmp_path / "inspect.png").exists()
