"""The studies of `lowrank-kv eviction` on a tiny model: errors against float64, equal bytes, and what is printed."""

import argparse
import contextlib
import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from eviction_oracle import kept_positions, softmax
from helpers import PLAIN, WINDOWED, model, prompts
from suites import Letters

from lowrank_kv_jax.cli import eviction as command
from lowrank_kv_jax.cli import main, options
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.studies.eviction import run as eviction
from lowrank_kv_jax.evals.studies.eviction import tasks
from lowrank_kv_jax.evals.studies.eviction.error import ORDERS, LayerError, average, eviction_errors
from lowrank_kv_jax.evals.studies.eviction.speed import eviction_speed
from lowrank_kv_jax.generation.forward import embed_tokens, layer_prefill, make_layout
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache

CONFIG = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
SETTINGS = eviction.Settings(length=128, budgets=(48,), windows=1, scored=32, samples=0)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the studies read of a `LoadedModel`."""

    config: object = CONFIG
    params: object = dataclasses.field(default_factory=lambda: model(CONFIG).params)
    tokenizer: object = dataclasses.field(default_factory=Characters)
    name: str = "tiny"
    fingerprint: str = "f" * 8


@functools.cache
def first_layer(tokens: int):
    """Queries, keys and values of the first layer, float64."""
    ids = prompts(rows=1, length=tokens)
    x = embed_tokens(CONFIG, model(CONFIG).params, ids)
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    _, taps = layer_prefill(CONFIG, None, model(CONFIG).params["layers"][0], x, positions)
    return ids, taps


def test_errors_are_those_of_the_definitions():
    """Equations 2, 3 and 7 in float64, from the positions that the method kept."""
    prompt, new = 96, 8
    ids, taps = first_layer(prompt + new)
    spec = "h2o:budget=24+moments:order=gaussian"
    (row,) = eviction_errors(Loaded(), {spec: parse_method(spec)}, np.asarray(ids[0]), new)
    method = parse_method(spec)
    layout = make_layout(CONFIG, 1, prompt, prompt + new, new, jnp.float32)
    before = taps.part(slice(prompt))
    state = jax.jit(lambda t: machine_of(method).compress(layout, None, machine_of(method).init(layout, None), (t,), jnp.asarray([prompt])))(before)
    q, k, v = (np.asarray(x[0], np.float64) for x in (taps.q, taps.k, taps.v))
    mass, error, angle, cosine = [], [], [], []
    for n in range(CONFIG.q_heads):
        head = n // 2
        kept = np.zeros(prompt, bool)
        kept[[*kept_positions(state, CONFIG.kv_heads)[head], *range(prompt - 12, prompt)]] = True
        keys, values = k[:prompt, head], v[:prompt, head]
        for query in q[prompt:, n]:
            p = softmax(keys @ query / np.sqrt(8))
            full, lost = p @ values, p[~kept].sum()
            held, gone = p[kept] @ values[kept] / (1 - lost), p[~kept] @ values[~kept] / lost
            slope = values[~kept].T @ (keys[~kept] - keys[~kept].mean(0)) / (np.sqrt(8) * (~kept).sum())
            guess = values[~kept].mean(0) + slope @ query
            mass.append(lost)
            error.append(np.linalg.norm(full - held) / np.linalg.norm(full))
            angle.append(held @ gone / np.linalg.norm(held) / np.linalg.norm(gone))
            cosine.append(guess @ gone / np.linalg.norm(guess) / np.linalg.norm(gone))
    got = (row.mass, row.error, row.angle, row.cosine["1"])
    np.testing.assert_allclose(got, [np.mean(x) for x in (mass, error, angle, cosine)], atol=1e-4)


def test_means_are_taken_over_texts_and_layers():
    spec = "h2o:budget=24+moments:order=gaussian"
    texts = [np.asarray(prompts(rows=1, length=104, seed=seed)[0]) for seed in range(2)]
    each = [eviction_errors(Loaded(), {spec: parse_method(spec)}, text, 8) for text in texts]
    mean = eviction.means(average(each))[spec]
    assert mean.error == pytest.approx((each[0][0].error + each[1][0].error) / 2) and each[0][0].error != each[1][0].error
    assert mean.corrected["0"] == pytest.approx(np.mean([rows[0].corrected["0"] for rows in each]))


def test_layers_that_slide_a_window_are_left_out():
    """Their moments are never merged, and attention to the whole prompt is not what they compute."""
    loaded = Loaded(WINDOWED, model(WINDOWED).params)
    specs = ("h2o:budget=24+moments:order=gaussian", "momentkv:budget=40,order=gaussian")
    rows = eviction_errors(loaded, {s: parse_method(s) for s in specs}, np.asarray(prompts(rows=1, length=104)[0]), 8)
    assert [(row.spec, row.layer) for row in rows] == [(spec, 1) for spec in specs]


def test_what_is_left_out_is_said_once_and_a_model_without_a_layer_to_measure_is_refused(monkeypatch, capsys):
    loaded, orders = Loaded(WINDOWED, params=None), dict.fromkeys(ORDERS, 0.5)
    row = LayerError(eviction.error_specs([48])[0], 1, 0.5, 0.5, 0.5, orders, orders, orders)
    monkeypatch.setattr(eviction, "errors_by_text", lambda *_: [[row], [row]])
    monkeypatch.setattr(eviction, "error_specs", lambda budgets: [row.spec])
    monkeypatch.setattr(options, "load_from", lambda args: loaded)
    arguments = ["eviction", "--studies", "error", "--length", "128", "--budgets", "48"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("of 1 of 2 layers; the others slide a window") == 1
    loaded = Loaded(dataclasses.replace(WINDOWED, windows=(24, 24)), params=None)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "windows=(24, 24): every layer of this model slides one" in shown.err


@pytest.mark.parametrize("layers", [3, 10])
def test_equal_bytes_are_equal_but_for_a_slot_in_each_layer(layers):
    loaded = Loaded(dataclasses.replace(PLAIN, num_layers=layers, windows=(None,) * layers), params=None)
    specs = eviction.equal_bytes_specs(loaded, SETTINGS, 64)
    layout = make_layout(loaded.config, 1, SETTINGS.length, SETTINGS.length + SETTINGS.scored)
    spent = [cache_bytes(abstract_cache(parse_method(spec), layout)).total for spec in specs]
    slot = 4 * (2 * 2 * 8 + 4 + 4) * layers  # of four heads: key and value, position, score
    assert [spec.partition(":")[0] for spec in specs] == [*eviction.BASELINES, "momentkv"]
    assert all(spent[-1] - 2 * slot < bytes_ <= spent[-1] for bytes_ in spent)


@pytest.mark.slow
def test_bytes_are_those_foretold_and_times_are_there():
    specs = {spec: parse_method(spec) for spec in ("full", "momentkv:budget=48")}
    rows = eviction_speed(Loaded(), specs, 160, steps=32, rounds=1)
    for row in rows:
        assert row.cache_bytes == row.predicted_bytes and row.step_ms > 0 and row.attention_ms > 0
    assert rows[1].cache_bytes != rows[0].cache_bytes


def test_moments_in_16_bits_are_measured_after_whole_windows():
    """Measured after whole windows; finer steps err less."""
    windows = np.asarray(prompts(rows=3, length=64))
    rows = eviction.precision_errors(Loaded(), windows[:1], (10, 100))
    assert [(row.dtype, row.evictions) for row in rows] == [
        (dtype, count) for count in (64, 128) for dtype in ("bfloat16", "float16", "int16")]
    assert all(0 < row.lse < 0.1 and 0 < row.output < 0.1 for row in rows)
    bfloat16, float16, int16 = rows[3:]
    assert int16.lse < float16.lse < bfloat16.lse and int16.output < float16.output < bfloat16.output
    with pytest.raises(ValueError, match="length=31: must be at least 32"):
        eviction.precision_errors(Loaded(), windows[:, :31], (10,))


@pytest.mark.slow
def test_the_command_prints_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(options, "load_from", lambda args: Loaded())
    monkeypatch.setattr(eviction, "ablation_specs", lambda budget: [f"momentkv:budget={budget}"])
    monkeypatch.setattr(eviction, "error_specs", lambda budgets: [f"momentkv:budget={budgets[0]},order=gaussian"])
    path = tmp_path / "records.jsonl"
    arguments = ["eviction", "--studies", "error", "ablation", "--length", "128", "--budgets", "48", "--windows", "1",
                 "--samples", "0", "--json", str(path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "eviction error by layer" in printed and "momentkv:budget=48" in printed and "bytes of full" in printed
    found = read_records(path)
    assert {(r["command"], r["task"]) for r in found} == {("eviction", "eviction-error"), ("eval perplexity", "perplexity-stream")}


def test_recovery_is_the_share_of_the_gap_that_is_closed():
    known = tasks.specs_of([64])
    scores = {"full": (100, 60), "adakv:budget=64": (60, 20), "momentkv:budget=64": (80, 30)}  # of a gap of 40, 15
    records = [{"method": spec, "task": task, "score": score, "cache_bytes": 10, "full_cache_bytes": 40}
               for spec in known for task, pair in (("a", scores.get(spec, (50, 30))[0]), ("b", scores.get(spec, (50, 30))[1]))
               for score in (pair - 1, pair + 1)]
    rows = {row.spec: row for row in tasks.summed_up(records, known)}
    assert rows["momentkv:budget=64"].recovery == pytest.approx(37.5) and rows["momentkv:budget=64"].by_task == {"a": 80, "b": 30}
    assert rows["momentkv:budget=64,nc=false"].recovery == 0
    assert rows["full"].recovery is None and rows["adakv:budget=64"].recovery is None
    assert {row.part for row in rows.values()} == {"full", "snapkv", "adakv", *tasks.PARTS}


@pytest.mark.slow
def test_tasks_of_a_file_under_the_papers_protocol(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(options, "load_from", lambda args: Loaded(tokenizer=Letters()))
    monkeypatch.setattr(tasks, "PARTS", {"MI and NC": ""})
    row = {"context": "fox " * 40, "input": "who?", "answers": ["fox"], "all_classes": None, "_id": "1"}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row))
    path = tmp_path / "records.jsonl"
    assert main(["eviction", "--studies", "tasks", "--longbench", str(tmp_path), "--tasks", "qasper", "--length", "128",
                 "--budgets", "48", "--samples", "1", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "tasks, query-aware" in printed and "MI and NC" in printed
    found = read_records(path)
    assert {r["protocol"] for r in found} == {"query-aware"} and len(found) == 4


@pytest.mark.parametrize("arguments, message", [
    (["--length", "64", "--budgets", "64"], "budgets=[64]: each must lie in 1..63"),
    (["--windows", "0"], "windows=0: must be at least 1"),
    (["--rounds", "0"], "--rounds 0: must be at least 1"),
    (["--studies", "precision", "--length", "16", "--budgets", "4"], "--length 16: must be at least 32 for --studies precision"),
    (["--tasks", "vt"], "--tasks vt: is of the study tasks alone; give --studies tasks too"),
    (["--longbench", "x", "--studies", "error"], "--longbench x: is of the study tasks alone"),
    (["--protocol", "query-aware"], "--protocol query-aware: is of the study tasks alone"),
    (["--studies", "tasks", "--samples", "0"], "--samples 0: must be at least 1 for --studies tasks"),
])
def test_mistakes_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    assert main(["eviction", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_help_says_what_samples_and_seeds_are_of():
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        parser.parse_args(["eviction", "--help"])
    text = " ".join(shown.getvalue().split())
    assert "of tasks: samples of each task" in text and "perplexities are of the first texts at every seed" in text


@pytest.mark.parametrize("words, message", [
    ("error speed --length 128 --budgets 48 --timed-length 600", "--timed-length 600: must be at most 512, the model's context"),
    ("error speed --length 128 --budgets 48 --timed-length 64", "--timed-length 64: must be above the 64 decode steps"),
    ("error ablation --length 500 --budgets 48", "--length 500: must be at most 480, the model's context of 512 tokens less 32"),
    ("precision ablation --length 128 --budgets 8", "budget=8: must exceed sinks + recent"),
    ("error speed --length 128 --budgets 48 --timed-budget 8", "budget=8: must exceed sinks + recent"),
    ("error tasks --length 128 --budgets 48 --tasks nothing", "unknown RULER task 'nothing'"),
    ("error tasks --length 128 --budgets 48 --longbench x --tasks nothing", "unknown LongBench task 'nothing'"),
    ("error tasks --length 128 --budgets 48 --longbench nosuch", "nosuch: no such folder"),
])
def test_mistakes_are_told_before_anything_is_measured(words, message, monkeypatch, capsys):
    monkeypatch.setattr(options, "load_from", lambda args: Loaded())
    assert main(["eviction", "--windows", "1", "--studies", *words.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err


@pytest.mark.parametrize("specs, options, message", [
    (["ojakv"], {}, "need calibrated bases"), (["full"], {"steps": 33}, "steps=33"), (["full"], {"length": 600}, "length=600"),
])
def test_what_cannot_be_timed_is_refused(specs, options, message):
    with pytest.raises(ValueError, match=message):
        eviction_speed(Loaded(), {s: parse_method(s) for s in specs}, **({"length": 200} | options))
