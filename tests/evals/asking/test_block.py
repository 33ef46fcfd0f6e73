"""Blocks that a suite's caches take between two refreshes."""

import dataclasses

import pytest
from suites import METHODS, Loaded, questions

from lowrank_kv_jax.evals.asking.suite import Suite, evaluate
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
