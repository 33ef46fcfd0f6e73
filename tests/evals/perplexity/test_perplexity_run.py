"""Perplexity of a text, window by window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN
from helpers import model as tiny
from suites import Loaded

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.perplexity import divergence
from lowrank_kv_jax.evals.perplexity import run as perplexity_run
from lowrank_kv_jax.evals.perplexity.run import cut_windows, evaluate_perplexity, mean_divergence, total_perplexity
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.generation.forward import embed_tokens, layer_prefill, logits_of

TEXT = Corpus.of([f"sentence {i} of a text. " for i in range(20)], "made up")
TWO = parse_methods(["full", "streamingllm:keep=0.4,sinks=4"])


def nll_of(window):
    """Of the scored tokens of a window by exact attention, no cache involved."""
    params, tokens = tiny().params, jnp.asarray([window.context + window.scored])
    positions = jnp.arange(tokens.shape[1])[None]
    x = embed_tokens(PLAIN, params, tokens)
    for layer in params["layers"]:
        x, _ = layer_prefill(PLAIN, None, layer, x, positions)
    logp = np.asarray(jax.nn.log_softmax(logits_of(PLAIN, params, x)))[0]
    begin = len(window.context)
    return -sum(float(logp[begin + i - 1, token]) for i, token in enumerate(window.scored))


@pytest.mark.parametrize(("size", "length", "step"), [(300, 64, 16), (300, 64, 63), (64, 64, 1), (65, 64, 32),
                                                      (10, 64, 32)])
def test_sliding_windows_score_every_token_but_the_first_once(size, length, step):
    windows = cut_windows(range(size), "sliding", length, step)
    assert [token for window in windows for token in window.scored] == list(range(1, size))
    for window in windows:
        both = window.context + window.scored
        assert both == tuple(range(both[0], both[0] + len(both))) and len(both) <= length
        assert window.index == 0 or both[0] == window.index * step


def test_streams_are_disjoint():
    windows = cut_windows(range(300), "stream", 64, 48)
    assert [window.shape for window in windows] == [(48, 16)] * 4
    assert [window.context[0] for window in windows] == [0, 64, 128, 192]


@pytest.mark.parametrize(("mode", "step"), [("stream", 40), ("sliding", 24)])
def test_with_the_full_cache_it_is_the_model_s(mode, step):
    records = evaluate_perplexity(
        Loaded(), {"full": TWO["full"]}, TEXT, mode, 64, step, 3, dtype="float32", rows=2
    )
    ids = [ord(c) % 64 for c in "\n\n".join(TEXT.texts)]
    windows = cut_windows(ids, mode, 64, step)[:3]
    for record, window in zip(records, windows, strict=True):
        assert record["nll"] == pytest.approx(nll_of(window), abs=1e-3)
    total = sum(map(nll_of, windows)) / sum(len(window.scored) for window in windows)
    assert total_perplexity(records, "full") == pytest.approx(np.exp(total), rel=1e-4)


def test_divergence_is_that_of_the_predictions(monkeypatch):
    rng = np.random.default_rng(0)
    full, other = rng.normal(size=(2, 1, 3, 64)) * 3
    logp, logq = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (full, other))
    exact = (np.exp(logp) * (logp - logq)).sum(-1)
    for count, tolerance in ((64, 1e-4), (40, 0.1)):  # tokens that are told apart
        monkeypatch.setattr(divergence, "LIKELIEST", count)
        jax.clear_caches()
        known = divergence.Predictions()
        known.keep(jnp.asarray(full))
        np.testing.assert_allclose(known.divergence(0, jnp.asarray(other)), exact, rtol=tolerance)
        assert known.divergence(0, jnp.asarray(full)).max() < 1e-5


def test_divergence_needs_the_full_cache_in_the_run():
    def nats(*specs):
        records = evaluate_perplexity(Loaded(), parse_methods(specs), TEXT, "stream", 64, 40, 3, dtype="float32", rows=2)
        return [mean_divergence(records, spec) for spec in specs]

    streaming, half = (f"streamingllm:keep={keep},sinks=4" for keep in (0.4, 0.8))
    less, more, exact = nats(streaming, half, "full")
    assert exact < 1e-6 < more < less
    assert nats(streaming) == [None]


def test_divergence_is_not_lost_when_a_run_goes_on(tmp_path):
    path, (full, other) = tmp_path / "r.jsonl", TWO

    def run(*specs):
        methods = {spec: TWO[spec] for spec in specs}
        return evaluate_perplexity(Loaded(), methods, TEXT, "stream", 64, 48, 2, dtype="float32", rows=2, json=path)

    assert {r["divergence"] for r in run(other)} == {None}
    run(full)
    records = run(full, other)
    exact, apart = (mean_divergence(records, spec) or 0.0 for spec in (full, other))
    assert exact < 1e-6 < apart
    lines = path.read_text()
    assert len(lines.splitlines()) == 6  # the full cache's once, the other's twice: the last counts
    assert run(full, other) == records and path.read_text() == lines
    path.write_text("".join(line for line in lines.splitlines(True) if f'"{other}"' not in line))
    assert [r["divergence"] for r in run(full, other)] == [r["divergence"] for r in records]


def test_a_divergence_that_is_not_finite_is_not_measured_again(tmp_path, monkeypatch):
    path, args = tmp_path / "r.jsonl", (Loaded(), TWO, TEXT, "stream", 64, 48, 1)
    monkeypatch.setattr(divergence.Predictions, "divergence", lambda self, at, logits: np.full(logits.shape[:2], np.nan))
    records = evaluate_perplexity(*args, json=path, rows=1)
    assert all(record["nll"] > 0 and record["divergence"] is None for record in records)
    monkeypatch.setattr(perplexity_run, "score_many", None)
    assert evaluate_perplexity(*args, json=path, rows=1) == records


def test_what_no_float_holds_is_infinite():
    assert total_perplexity([{"method": "full", "nll": 1e4, "scored_tokens": 10}], "full") == float("inf")


def test_it_goes_on_where_it_stopped(monkeypatch, tmp_path):
    path, args = tmp_path / "r.jsonl", (TEXT, "stream", 64, 48, 4)
    whole = evaluate_perplexity(Loaded(), TWO, *args, rows=2)
    append, left = perplexity_run.append_record, [3]

    def killed(file, record):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        append(file, record)

    monkeypatch.setattr(perplexity_run, "append_record", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_perplexity(Loaded(), TWO, *args, json=path, rows=2)
    assert len(read_records(path)) == 3
    monkeypatch.setattr(perplexity_run, "append_record", append)
    records = evaluate_perplexity(Loaded(), TWO, *args, json=path, rows=2)
    assert [r["nll"] for r in records] == [r["nll"] for r in whole]
    assert len(read_records(path)) == len(whole) == 8
    with pytest.raises(ValueError, match="another run .step was 48 and is now 40"):
        evaluate_perplexity(Loaded(), TWO, TEXT, "stream", 64, 40, 4, json=path, rows=2)


def test_a_block_is_a_condition(tmp_path):
    path, args = tmp_path / "r.jsonl", (Loaded(), TWO, TEXT, "stream", 64, 40, 1)
    short = evaluate_perplexity(*args, rows=1, dtype="float32", block=8, json=path)
    plain = evaluate_perplexity(*args, rows=1, dtype="float32")
    assert [{r["block"] for r in own} for own in (short, plain)] == [{8}, {None}]
    assert short[0]["nll"] == pytest.approx(plain[0]["nll"], rel=1e-5)  # of the full cache
    assert short[1]["bytes_by_kind"]["exact"] < plain[1]["bytes_by_kind"]["exact"]
    with pytest.raises(ValueError, match="another run .block was 8 and is now None"):
        evaluate_perplexity(*args, rows=1, dtype="float32", json=path)
    rounded = Loaded(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), Loaded().params))
    with pytest.raises(ValueError, match="another run .weights_dtype was 'float32' and is now 'bfloat16'"):
        evaluate_perplexity(rounded, *args[1:], rows=1, dtype="float32", block=8, json=path)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="block=0: must be at least 1"):
        evaluate_perplexity(Loaded(), TWO, TEXT, "stream", 64, 40, 1, block=0)
    with pytest.raises(ValueError, match="step=64: must lie in 1..63"):
        cut_windows(range(300), "stream", 64, 64)
    with pytest.raises(ValueError, match="mode='both'"):
        cut_windows(range(300), "both", 64, 32)
    with pytest.raises(ValueError, match="length=64: must be at most 30, as many as the text has tokens"):
        cut_windows(range(30), "stream", 64, 32)
    with pytest.raises(ValueError, match="the text has 1 tokens: must have at least 2"):
        cut_windows(range(1), "sliding", 64, 32)
    with pytest.raises(ValueError, match="length=1000: the model's context is 512"):
        evaluate_perplexity(Loaded(), TWO, TEXT, length=1000)
    with pytest.raises(ValueError, match="no tokenizer"):
        evaluate_perplexity(Loaded(tokenizer=None), TWO, TEXT)
