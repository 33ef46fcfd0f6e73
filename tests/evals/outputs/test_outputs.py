"""Errors of attention outputs against float64, across groups of layers, and as a command."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from character_tokenizer import Characters
from helpers import PLAIN, model, prompts, random_moments

from lowrank_kv_jax.calibration.taps import iterate_taps
from lowrank_kv_jax.cli import main, options
from lowrank_kv_jax.evals.outputs.errors import output_errors
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.methods.parse import parse_method

SINKS, RECENT, QUERIES = 4, 20, 8


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the evaluation reads of a `LoadedModel`."""

    config: object = PLAIN
    params: object = dataclasses.field(default_factory=lambda: model().params)
    tokenizer: object = dataclasses.field(default_factory=Characters)
    name: str = "tiny"
    fingerprint: str = "f" * 8


def attention(q, k, v, seen=True):
    """Outputs `[T, N, D]` over k, v `[S, K, D]`, where `seen` `[T, S]`, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = np.einsum("tnd,snd->nts", q, k) / np.sqrt(q.shape[-1])
    logits = np.where(seen, logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("nts,snd->tnd", p / p.sum(-1, keepdims=True), v)


def test_errors_are_those_of_float64():
    tokens = np.asarray(prompts(rows=1, length=72)[0])
    spec = f"streamingllm:budget={SINKS + RECENT},sinks={SINKS},positions=original"
    found = output_errors(Loaded(), {spec: parse_method(spec), "full": parse_method("full")}, tokens, QUERIES, bases={},
                          dtype="float32")
    assert (found["full"] == 0).all()
    slots = np.arange(72 - QUERIES)
    seen = (slots < SINKS) | (slots > np.arange(72 - QUERIES, 72)[:, None] - RECENT)  # a window that moves on
    for layer, taps in enumerate(iterate_taps(PLAIN, model().params, tokens[None])):
        q, k, v = taps.q[0, -QUERIES:], taps.k[0, :-QUERIES], taps.v[0, :-QUERIES]
        exact, ours = attention(q, k, v), attention(q, k, v, seen)
        wanted = np.sqrt(np.square(ours - exact).sum() / np.square(exact).sum())
        np.testing.assert_allclose(found[spec][layer], wanted, rtol=2e-4)


@pytest.mark.slow
def test_groups_of_layers_are_measured_layer_by_layer():
    tokens = np.asarray(prompts(rows=1, length=72)[0])
    specs = ["transform:bits=2,group=2,metric=plain,sampled=False", "transform:bits=8,group=2,metric=plain,sampled=False"]
    methods = {spec: parse_method(spec) for spec in specs}
    moments = random_moments(PLAIN, group=2)
    bases = {spec: method.fit(PLAIN.attention, moments) for spec, method in methods.items()}
    coarse, fine = output_errors(Loaded(), methods, tokens, QUERIES, bases=bases, dtype="float32").values()
    assert coarse.shape == fine.shape == (PLAIN.num_layers,) and (fine < coarse).all() and (fine > 0).all()


def test_the_command_prints_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(options, "load_from", lambda args, mesh=None: Loaded())
    text = tmp_path / "text.txt"
    text.write_text("What is told three times is true. " * 20)
    arguments = ["eval", "outputs", "--text", str(text), "--length", "96", "--queries", "8", "--windows", "2",
                 "--methods", "full", "h2o:budget=24,recent=8", "--json", str(tmp_path / "records.jsonl")]
    assert main(arguments) == 0
    assert "worst layer" in capsys.readouterr().out
    records = read_records(tmp_path / "records.jsonl")
    assert [(r["method"], r["index"]) for r in records] == [
        (spec, i) for i in range(2) for spec in ("full", "h2o:budget=24,recent=8")]
    assert all(len(r["errors"]) == PLAIN.num_layers for r in records) and records[0]["score"] == 0 < records[1]["score"]
    assert main(arguments) == 0 and read_records(tmp_path / "records.jsonl") == records  # nothing was measured again
    assert json.dumps(records) and main([*arguments[:-1], str(tmp_path), "--queries", "96"]) == 2


def test_errors_that_are_no_numbers_are_told_before_anything_is_written(tmp_path, monkeypatch, capsys):
    broken = jax.tree.map(lambda x: x * np.nan, model().params)
    monkeypatch.setattr(options, "load_from", lambda args, mesh=None: Loaded(params=broken))
    (tmp_path / "text.txt").write_text("What is told three times is true. " * 20)
    assert main(["eval", "outputs", "--text", str(tmp_path / "text.txt"), "--length", "96", "--queries", "8", "--windows", "1",
                 "--methods", "full", "--json", str(tmp_path / "records.jsonl")]) == 2
    assert "full: the errors of layer 0 are not finite in window 0" in capsys.readouterr().err
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize("queries", [0, 72])
def test_queries_lie_within_the_text(queries):
    with pytest.raises(ValueError, match=f"queries={queries}: must lie in 1..71"):
        output_errors(Loaded(), {}, np.zeros(72, int), queries, bases={}, dtype="float32")
