"""`lowrank-kv bench serve`: its stream, what it measures, prints and records."""

import collections

import pytest
from suites import Letters, Loaded

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.speed.serve import bench_serve
from lowrank_kv_jax.evals.speed.stream import make_stream, room_for
from lowrank_kv_jax.methods.parse import parse_method


def test_half_of_a_stream_shares_its_contexts():
    stream = make_stream(Letters(), 16, (450, 700), 4, seed=0)
    counts = collections.Counter(one.context for one in stream)
    assert sorted(counts.values()) == [1] * 8 + [4] * 2
    for one in stream:
        assert 350 < len(one.context) <= 700 and one.shared == (counts[one.context] == 4)
        digits = Letters()(one.answer).input_ids
        assert any(list(one.context[i : i + 7]) == digits for i in range(len(one.context)))
    assert make_stream(Letters(), 16, (450, 700), 4, seed=0) == stream != make_stream(Letters(), 16, (450, 700), 4, seed=1)
    assert not any(one.shared for one in make_stream(Letters(), 5, (450, 700), 1, seed=0))
    assert room_for(stream, 9) == max(len(one.question) for one in stream) + 9


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="lengths=700 450: the first must be at most the second"):
        make_stream(Letters(), 4, (700, 450), 4, seed=0)
    with pytest.raises(ValueError, match="lengths=100 200: too few tokens, the needles of a context alone take [0-9]{3}"):
        make_stream(Letters(), 4, (100, 200), 4, seed=0)
    with pytest.raises(ValueError, match="lengths=512 1024: with questions and answers more than the model's context of 512"):
        bench_serve(Loaded(), {"full": parse_method("full")}, "1MiB", requests=1, lengths=(512, 1024))
    with pytest.raises(ValueError, match="lengths=512 99999999: "):  # told before a context of that length is made
        bench_serve(Loaded(tokenizer=None), {"full": parse_method("full")}, "1MiB", lengths=(512, 99_999_999))


@pytest.mark.slow
def test_methods_share_the_stream_and_the_budget(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: Loaded())
    log, specs = tmp_path / "serve.jsonl", ["full", "kivi:bits=2"]
    asked = ["--lengths", "240", "320", "--asked", "1", "--requests", "9", "--memory", "600KB", "--methods", *specs]
    assert main(["bench", "serve", *asked, "--new-tokens", "12", "--json", str(log)]) == 0
    records, printed = read_records(log), capsys.readouterr().out
    assert [record["method"] for record in records] == specs and all(spec in printed for spec in specs)
    for record in records:
        assert record["samples"] == 9 and record["cache_bytes"] <= record["memory"] == 600_000
        assert record["tokens_per_s"] == pytest.approx(9 * 12 / record["seconds"])
        assert 0 < record["in_flight"] <= record["most_in_flight"] <= record["slots"]
        assert 0 < record["ttft_s"] <= record["ttft_95_s"] < record["seconds"]
    full, fewer = records
    assert fewer["slots"] > full["slots"] and fewer["most_in_flight"] > full["most_in_flight"]
