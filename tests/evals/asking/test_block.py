"""Blocks that a suite's caches take between two refreshes."""

import dataclasses

import pytest
from suites import METHODS, Loaded, fit, questions

from lowrank_kv_jax.evals.asking.suite import Suite, evaluate
from lowrank_kv_jax.evals.results.records import append_record
from lowrank_kv_jax.methods.parse import parse_method


def test_a_block_is_the_caches_and_stands_in_records(tmp_path):
    suite = Suite("eval test", questions(4), rows=2, seed=1)
    short = dataclasses.replace(suite, block=8)
    exact = {"full": METHODS["full"]}
    records, plain = (evaluate(Loaded(), exact, one, json=tmp_path / "of.jsonl" if one is short else None)
                      for one in (short, suite))
    assert {r["block"] for r in records} == {8} and {r["block"] for r in plain} == {None}
    assert [r["prediction"] for r in records] == [r["prediction"] for r in plain]
    with pytest.raises(ValueError, match="block was 8 and is now None"):
        evaluate(Loaded(), exact, suite, json=tmp_path / "of.jsonl")
    with pytest.raises(ValueError, match="block=0: must be at least 1"):
        dataclasses.replace(suite, block=0)
    coded = {"coded": parse_method("streamingllm:budget=12,sinks=4")}
    small, large = (evaluate(Loaded(), coded, one)[0]["bytes_by_kind"]["exact"] for one in (short, suite))
    assert small < large


@pytest.mark.slow
def test_a_methods_own_block_stands_in_its_records(tmp_path):
    coded = "transform:metric=plain,sampled=False"
    suite, methods = Suite("eval test", questions(2), rows=2, seed=1), {"full": METHODS["full"], coded: parse_method(coded)}
    records = evaluate(Loaded(), methods, suite, bases=fit)
    assert {(r["method"], r["block"], r["own_block"]) for r in records} == {("full", None, None), (coded, None, 16)}
    asked = evaluate(Loaded(), methods, dataclasses.replace(suite, block=32), bases=fit)
    assert {(r["block"], r["own_block"]) for r in asked} == {(32, None)}
    exact = [next(r["bytes_by_kind"]["exact"] for r in own if r["method"] == coded) for own in (records, asked)]
    assert exact[0] < exact[1]
    older = {name: value for name, value in records[1].items() if name != "own_block"}  # in a block of 32, before
    append_record(tmp_path / "of.jsonl", older)
    with pytest.raises(ValueError, match="own_block was None and is now 16"):
        evaluate(Loaded(), methods, suite, bases=fit, json=tmp_path / "of.jsonl")
