"""`lowrank-kv bench decode`: what it times, prints and records."""

import dataclasses

from helpers import PLAIN, model
from suites import Loaded

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records


def test_speeds_sizes_and_temporaries_stand_side_by_side(tmp_path, capsys, monkeypatch):
    config = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: Loaded(config, model(config).params))
    log, specs = tmp_path / "decode.jsonl", ["full", "streamingllm:budget=16"]
    asked = ["--lengths", "90", "--steps", "3", "--rounds", "2", "--methods", *specs, "--memory", "--json", str(log)]
    assert main(["bench", "decode", *asked]) == 0
    records, printed = read_records(log), capsys.readouterr().out
    assert [r["method"] for r in records] == specs and "temporaries, MiB" in printed
    assert all(len(rounds) == 2 for record in records for rounds in record["rounds"].values())
    assert all(record["decode_tokens_per_s"] > 0 and record["temporary_bytes"] > 0 for record in records)
    assert records[1]["cache_bytes"] < records[0]["cache_bytes"]
