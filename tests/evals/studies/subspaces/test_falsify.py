"""Error tracking, the falsifiers and the roofline: exact where theory says so, and commands that run."""

import argparse
import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from helpers import PLAIN, PROMPT, bases_for, model, prompts
from scipy.stats import spearmanr

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.calibration.calibrate import collect_moments
from lowrank_kv_jax.cli import falsify as falsify_command
from lowrank_kv_jax.cli import roofline as roofline_command
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.speed import roofline
from lowrank_kv_jax.evals.studies.subspaces import drift, falsify
from lowrank_kv_jax.evals.studies.subspaces.chunk_errors import code_prompt, errors_by_chunk, sketching
from lowrank_kv_jax.evals.studies.subspaces.error_tracking import attention_errors, track_errors
from lowrank_kv_jax.evals.studies.subspaces.prediction import rank_correlation
from lowrank_kv_jax.evals.studies.subspaces.residuals import prompt_residuals
from lowrank_kv_jax.generation.forward import (
    compress_group,
    decode_step,
    embed_tokens,
    layer_prefill,
    make_layout,
    prefill,
)
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.models.load import LoadedModel
from lowrank_kv_jax.saving.saved_cache import abstract_cache

ADAPTIVE = "osp:follow,rank=4,chunk_length=32,min_chunk=16,sinks=4,recent=8,lookahead=16"
LENGTHS = jnp.array([PROMPT, 61], jnp.int32)
jitted_errors = jax.jit(attention_errors, static_argnums=(0, 1, 6))


@functools.cache
def first_layer(spec):
    """Method, layout, bases, state and taps of a compressed layer, keys made large so that errors are."""
    method, tokens, params = parse_method(spec), prompts(), model().params
    positions = jnp.broadcast_to(jnp.arange(PROMPT), tokens.shape)
    _, taps = layer_prefill(PLAIN, None, params["layers"][0], embed_tokens(PLAIN, params, tokens), positions)
    taps = taps._replace(q=4 * taps.q, k=4 * taps.k, k_pre=4 * taps.k_pre)
    layout = make_layout(PLAIN, 2, PROMPT, 160, 16, jnp.float32)
    bases = bases_for(method)[0]
    return method, layout, bases, compress_group(method, layout, bases, (taps,), LENGTHS), taps


# ---- error tracking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [
    pytest.param(ADAPTIVE, marks=pytest.mark.slow), pytest.param("osp-static:rank=4,gamma=sqrt_rank,sinks=4,recent=8", marks=pytest.mark.slow),
    "static-pca-h:rank=0.5,rope=pre,sinks=4,recent=8",
])
def test_bounds_hold_and_errors_are_those_of_attention(spec):
    """Section 8, with the residual K - gamma K^ so that the bound holds for any gamma."""
    method, layout, bases, state, taps = first_layer(spec)
    found = jitted_errors(method, layout, bases, state, taps, LENGTHS, 5)
    assert found.logit.shape == (2, 5, PLAIN.q_heads) and float(found.logit.max()) > 0.1
    slack = 1e-4
    assert (found.logit <= found.logit_bound + slack).all()
    assert (found.weight <= 2 * np.tanh(np.asarray(found.logit) / 2) + slack).all()
    assert (found.output <= found.measured_bound + slack).all()
    assert (found.measured_bound <= found.output_bound + slack).all()
    # the last query of the first row, against exact attention and against the cache itself
    q, at = taps.q[:1, -1:], jnp.array([[PROMPT - 1]])
    mask = np.ones((1, 1, PROMPT), bool)
    exact, _ = helpers.softmax_attention(q, taps.k[:1], taps.v[:1], mask, PLAIN.attention.scale)
    row = jax.tree.map(lambda x: x[:1], state)
    alone = dataclasses.replace(layout, batch=1)
    part = helpers.attend(machine_of(method), alone, bases, row, q, at)
    np.testing.assert_allclose(found.output[0, -1], np.linalg.norm(part.out - exact, axis=-1)[0, 0], atol=1e-4)
    np.testing.assert_allclose(found.output_norm[0, -1], np.linalg.norm(exact, axis=-1)[0, 0], rtol=1e-4)


def test_nothing_is_lost_at_full_rank():
    found = jitted_errors(*first_layer("osp-static:rank=1.0,sinks=4,recent=8"), LENGTHS, 3)
    for name in ("logit", "weight", "output", "logit_bound", "key_residual", "value_residual"):
        np.testing.assert_allclose(getattr(found, name), 0, atol=2e-4, err_msg=name)


def test_tracking_reports_every_layer_and_is_free_when_it_is_off():
    method, tokens, seen = parse_method("osp-static:rank=4,sinks=4,recent=8"), prompts(), []
    tracked = track_errors(method, seen.append, queries=2)
    bases = bases_for(method)

    def run(method):
        return jax.jit(lambda params, tokens: prefill(method, PLAIN, params, tokens, bases=bases, dtype=jnp.float32))

    plain, with_errors = run(method)(model().params, tokens), run(tracked)(model().params, tokens)
    jax.effects_barrier()
    assert len(seen) == PLAIN.num_layers and all(errors.logit.shape == (2, 2, PLAIN.q_heads) for errors in seen)
    np.testing.assert_array_equal(plain[1], with_errors[1])
    for ours, theirs in zip(jax.tree.leaves(plain[0].groups), jax.tree.leaves(with_errors[0].groups), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    layout = make_layout(PLAIN, 2, PROMPT, 160, 16, jnp.float32)
    taps = first_layer("osp-static:rank=1.0,sinks=4,recent=8")[-1]
    programs = [str(jax.make_jaxpr(lambda t, m=m: machine_of(m).compress(layout, bases[0], machine_of(m).init(layout, bases[0]), (t,), LENGTHS))(taps)) for m in (method, tracked)]
    assert "callback" not in programs[0] and "callback" in programs[1]
    with pytest.raises(TypeError, match="only methods that code tokens in a basis"):
        track_errors(parse_method("full"), seen.append)


# ---- falsifiers -------------------------------------------------------------------------------------------------


def test_errors_of_a_chunk_are_those_of_this_chunk_alone():
    """Against NumPy: what the sketch of its basis holds beyond it, residuals, logits, and outputs with all else exact."""
    spec = ADAPTIVE.replace("lookahead=16", "lookahead=0,prior=0,window=none")
    method, layout, bases, _, taps = first_layer(spec)
    method = sketching(method)
    coded = code_prompt(method, layout, bases, taps)
    found = errors_by_chunk(layout, coded, taps, 4, 3)
    owner, used = np.asarray(coded.owner), np.asarray(found.used)
    assert used.sum(1).tolist() == [3, 3] and owner[0].tolist() == [0, 0, 1, 1, 2, 2]  # 84 tokens in chunks of 32
    k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (taps.k, taps.v))
    close = [np.asarray(x, np.float64) for x in (coded.seen_k, coded.seen_v)]
    row, head, chunk = 1, 2, 1
    tokens = slice(4 + 32, 4 + 64)
    # the sketch: of all tokens before the chunk, and of the start; as many rows as it takes
    start = np.asarray(bases.k, np.float64)[head]
    fed = k[row, head, 4:36]
    moment = fed.T @ fed + 1e-3 * (start * (2 - np.arange(4) / 4)) @ start.T
    values = np.sort(np.linalg.eigvalsh(moment))[::-1]
    if method.learner(4, PLAIN.head_dim).size >= PLAIN.head_dim:
        np.testing.assert_allclose(found.key_sketch[row, head, chunk], np.sqrt(values[4]), rtol=1e-3)
    changed = [x.copy() for x in (k[row, head], v[row, head])]
    for x, seen in zip(changed, close, strict=True):
        x[tokens] = seen[row, head, 32:64]
    left = [np.linalg.norm(x - y, 2) for x, y in zip(changed, (k[row, head], v[row, head]), strict=True)]
    np.testing.assert_allclose([found.key_residual[row, head, chunk], found.value_residual[row, head, chunk]], left, rtol=1e-3)
    logit, output = [], []
    group = PLAIN.q_heads // PLAIN.kv_heads
    for at in range(PROMPT - 3, PROMPT):
        for q in np.asarray(taps.q, np.float64)[row, at, head * group : (head + 1) * group]:
            outs = []
            for keys, held in ((k[row, head], v[row, head]), changed):
                logits = keys[: at + 1] @ q * PLAIN.attention.scale
                weights = np.exp(logits - logits.max())
                outs.append((logits, weights @ held[: at + 1] / weights.sum()))
            logit.append(np.abs(outs[0][0] - outs[1][0]).max())
            output.append(np.linalg.norm(outs[0][1] - outs[1][1]))
    np.testing.assert_allclose(found.logit[row, head, chunk], np.mean(logit), rtol=1e-3)
    np.testing.assert_allclose(found.output[row, head, chunk], np.mean(output), rtol=1e-3)
    for error, bound in ((found.logit, found.logit_bound), (found.output, found.output_bound)):
        assert (np.asarray(error)[0, :, used[0]] <= np.asarray(bound)[0, :, used[0]] + 1e-4).all()
    with pytest.raises(ValueError, match="codes no tokens in chunks"):
        sketching(parse_method("osp-static:rank=4"))


@pytest.mark.slow
def test_residuals_by_position_and_phase_add_up_to_those_of_the_prompt():
    spec = ADAPTIVE + ",tau_k=0.5"
    method, tokens = parse_method(spec), np.asarray(prompts())
    rows = {row["what"]: row for row in drift.residual_profile(tiny(), method, tokens, bases_for(method), "float32", parts=1)}
    (whole,) = (row for what, row in rows.items() if what.startswith("tokens"))
    plain = dataclasses.replace(sketching(method))
    left = prompt_residuals(tiny(), plain, tokens, bases_for(plain), "float32")
    k, v = (float(left_.sum() / norm.sum()) for norm, left_ in ((left.k_norm, left.k_left), (left.v_norm, left.v_left)))
    assert whole["rer_k"] == pytest.approx(k, rel=1e-3) and whole["rer_v"] == pytest.approx(v, rel=1e-3)
    assert any(what.startswith("pairs, phase") for what in rows)
    counted = drift.chunks_against_drift(tiny(), method, {"a": tokens, "b": tokens[:, ::-1]}, bases_for(method), "float32")
    assert counted[0]["chunks"] >= 3 and 0 < counted[0]["drift"] < 1 and -1 <= counted[-1]["chunks"] <= 1
    with pytest.raises(ValueError, match="tau_k=None, tau_v=None: without a threshold"):
        drift.chunks_against_drift(tiny(), parse_method(ADAPTIVE), {"a": tokens}, bases_for(method), "float32")


def test_rank_correlation_is_spearmans():
    x = np.array([3.0, 1.0, 2.0, 9.0])
    assert rank_correlation(x, x**3) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, np.ones(4)) == 0
    tied, falling = np.array([1.0, 1.0, 2.0, 2.0]), np.arange(4.0)
    assert rank_correlation(tied, falling) == pytest.approx(spearmanr(tied, falling).statistic)
    assert rank_correlation(tied[::-1], falling[::-1]) == pytest.approx(rank_correlation(tied, falling))


def tiny():
    return LoadedModel("tiny", PLAIN, model().params, Characters(), "a" * 64)


def test_residuals_are_those_of_the_coded_tokens():
    """RER of a prompt from the codes equals the projection error of its taps."""
    spec = "osp-static:rank=4,sinks=4,recent=8"
    method, tokens = parse_method(spec), np.asarray(prompts())
    found = prompt_residuals(tiny(), method, tokens, bases_for(method), "float32")
    assert found.k_left.shape[:3] == (PLAIN.num_layers, 2, PLAIN.kv_heads)
    params = model().params
    positions = jnp.broadcast_to(jnp.arange(PROMPT), tokens.shape)
    _, taps = layer_prefill(PLAIN, None, params["layers"][0], embed_tokens(PLAIN, params, jnp.asarray(tokens)), positions)
    x, u = np.asarray(taps.v, np.float64)[:, 4:-8].swapaxes(1, 2), np.asarray(bases_for(method)[0].v, np.float64)
    left = ((x - x @ u @ np.swapaxes(u, -1, -2)) ** 2).sum(-1)
    np.testing.assert_allclose(found.v_left[0, :, :, : PROMPT - 12], left, rtol=1e-3, atol=1e-6)
    assert not found.v_left[..., PROMPT - 12 :].any()
    k, v = found.energy_ratio()
    assert 0 < k < 1 and 0 < v < 1


@pytest.mark.slow
def test_thresholds_hold_the_percentile_that_was_asked_for():
    moments = collect_moments(tiny(), np.asarray(prompts(rows=1)))
    run = falsify.Run(tiny(), moments, "osp-static:sinks=4,recent=8", ADAPTIVE.replace("rank=4,", ""), "float32")
    low, high = (falsify.residual_thresholds(run, np.asarray(prompts()), 0.5, p) for p in (10, 90))
    assert all(0 < a < b < 1 for a, b in zip(low, high, strict=True))
    with pytest.raises(ValueError, match=r"percentile=101: must lie in \[0, 100\]"):
        falsify.residual_thresholds(run, np.asarray(prompts()), 0.5, 101)


@pytest.mark.slow
def test_the_falsifying_command_gives_four_verdicts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: tiny())
    for name in ("prose", "code"):
        (tmp_path / f"{name}.txt").write_text(f"some {name} text, " * 80)
    parser = argparse.ArgumentParser()
    falsify_command.add_parser(parser.add_subparsers())
    args = parser.parse_args([
        "falsify", "--calibrate", str(tmp_path / "prose.txt"), "--texts", str(tmp_path / "prose.txt"), str(tmp_path / "code.txt"),
        "--calibrate-windows", "1", "--windows", "1", "--ranks", "0.5", "--length", "64", "--lengths", "48", "64", "--scored", "8",
        "--adaptive", ADAPTIVE.replace("rank=4,", ""), "--static", "osp-static:sinks=4,recent=8", "--spectra", "32", "--drift",
        "--json", str(tmp_path / "out.jsonl"),
    ])
    assert args.run(args) == 0
    out = capsys.readouterr().out
    assert out.count("falsified: ") + out.count("FALSIFIED: ") == 4 and "90% of the energy" in out
    records = read_records(tmp_path / "out.jsonl")
    assert {record["task"] for record in records} == {f"falsifier {n}" for n in range(1, 5)}
    bounds = [record for record in records if record["task"] == "falsifier 4"]
    assert [record["violated"] for record in bounds[-2:]] == [0, 0] and "by position and by phase" in out
    args.lengths = [128]
    with pytest.raises(ValueError, match="--lengths"):
        args.run(args)


# ---- the roofline -----------------------------------------------------------------------------------------------

WIDE = dataclasses.replace(
    PLAIN, hidden_size=64, head_dim=32, rope=RopeSpec(1e4, 32), num_layers=2, windows=(None, None), context=8192
)


@pytest.mark.parametrize("spec, within", [
    ("full", 0.1), ("osp:rank=0.5", 0.1), ("static-pca-h:rank=0.5,rope=pre", 0.1),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in (("xkv:rank=0.25,group=2", 0.1), ("kivi:bits=4", 0.4), ("h2o:budget=128", 0.25))),
])
def test_counts_agree_with_the_compiler_and_the_accountant(monkeypatch, spec, within):
    """FLOPs within a tenth of XLA's `cost_analysis`, of unpacking and ranking, which it rewrites, within more; bytes are the
    accountant's, and no more than XLA moves. All tokens are one block: of a loop XLA counts one turn."""
    monkeypatch.setattr("lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.reference.even_block", lambda size, *rest: size)
    monkeypatch.setattr("lowrank_kv_jax.pallas_kernels.chunked_attention.rebuilt.block_width", lambda size, *rest: size)
    method = parse_method(spec)
    cost = roofline.decode_cost(WIDE, method, 448, 2, "float32", "float32")
    layout = make_layout(WIDE, 2, 416, 448, dtype="float32")
    bases = roofline.white_bases(WIDE.attention, method, "float32")
    cache = abstract_cache(method, layout, bases)
    params = jax.eval_shape(lambda: init_params(WIDE, jax.random.key(0)))
    token = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = jax.jit(functools.partial(decode_step, method, WIDE)).lower(params, cache, token, bases=bases).compile()
    analysis = compiled.cost_analysis()
    assert cost.flops == pytest.approx(analysis["flops"], rel=within)
    assert sum(cost.cache_bytes.values()) == cache_bytes(cache, bases).total
    assert cost.bytes <= analysis["bytes accessed"]


def test_loops_over_blocks_count_as_often_as_they_run():
    """The count grows linearly with the length, across the size at which attention begins to loop."""
    for spec in ("full", "osp:rank=0.5,chunk_length=1024", "single-svd:rank=0.5"):
        costs = (roofline.decode_cost(WIDE, parse_method(spec), n) for n in (1024, 2048, 8192))
        small, middle, large = (cost.attention_flops for cost in costs)
        assert (large - middle) / (middle - small) == pytest.approx(6, rel=0.15), spec


def test_a_roof_has_two_sides():
    cost = roofline.Cost(2e6, 1e6, 1000, {"exact": 500}, 10, 1)
    assert cost.bytes == 1500
    assert cost.seconds(roofline.Roof(1e3, 1e9)) == 1.5 and cost.bound(roofline.Roof(1e3, 1e9)) == "bandwidth"
    assert cost.seconds(roofline.Roof(1e6, 1e6)) == 2.0 and cost.bound(roofline.Roof(1e6, 1e6)) == "compute"


def test_the_roofline_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: LoadedModel("wide", WIDE, None, None, "a" * 64))
    parser = argparse.ArgumentParser()
    roofline_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["roofline", "--methods", "full", "osp:rank=0.5", "--lengths", "512", "1024", "--json", str(tmp_path / "r.jsonl")])
    assert args.run(args) == 0
    assert "osp:rank=0.5" in capsys.readouterr().out.replace("\n", "")
    records = {(r["method"], r["length"]): r for r in read_records(tmp_path / "r.jsonl")}
    assert records["osp:rank=0.5", 1024]["cache_bytes"] < records["full", 1024]["cache_bytes"]
    args.device = "abacus"
    with pytest.raises(ValueError, match="--device abacus: allowed are a100, h100"):
        args.run(args)
