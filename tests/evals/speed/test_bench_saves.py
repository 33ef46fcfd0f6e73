"""`lowrank-kv bench saves`: what it measures, prints and records."""

import os

import pytest
from suites import Loaded

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.speed.saves import bench_saves
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK
from lowrank_kv_jax.methods.parse import parse_method

FULL = {"full": parse_method("full")}


@pytest.mark.slow
def test_both_forms_are_saved_loaded_timed_and_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: Loaded())
    log, folder = tmp_path / "saves.jsonl", tmp_path / "saves"
    folder.mkdir()
    specs = ["full", "kivi:bits=2", "ojakv:rank=4"]
    asked = ["--lengths", "40", "--rounds", "2", "--methods", *specs, "--folder", str(folder), "--json", str(log)]
    assert main(["bench", "saves", *asked]) == 0
    records, printed = read_records(log), capsys.readouterr().out
    assert [(r["method"], r["task"]) for r in records] == [(s, form) for s in specs for form in ("plain", "compressed")]
    assert all(spec in printed for spec in specs) and "medians of 2 alternating rounds; bfloat16 caches" in printed
    for plain, compressed in zip(records[::2], records[1::2], strict=True):
        assert plain["cache_bytes"] == compressed["cache_bytes"] and plain["prefill_s"] == compressed["prefill_s"]
        assert 0 < compressed["disk_bytes"] < plain["disk_bytes"]  # fewer files' headers: the cache itself is tiny
    for record in records:
        assert record["samples"] == 2 and all(len(rounds) == 2 for rounds in record["rounds"].values())
        assert all(record[name] > 0 for name in ("prefill_s", "save_s", "load_s"))
    assert records[0]["bytes_by_kind"]["exact"] == 3 * 2 * 4 * (40 + DEFAULT_BLOCK) * 8 * 2
    assert not os.listdir(folder)


def test_a_prompt_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="beyond the model's context"):
        bench_saves(Loaded(), FULL, [10**6])


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lowrank_kv_jax.evals.speed.saves.save_cache", full)
    with pytest.raises(OSError, match="No space left"):
        bench_saves(Loaded(), FULL, [40], folder=tmp_path)
    assert not os.listdir(tmp_path)
