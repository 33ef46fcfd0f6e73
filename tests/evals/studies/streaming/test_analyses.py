"""The analyses of the StreamingKV paper on a tiny model: tokens by text, columns, hyperparameters, prompt and answer."""

import functools

import numpy as np
import pytest
from helpers import PLAIN, bases_for, model, prompts

from lowrank_kv_jax.calibration.calibrate import collect_moments
from lowrank_kv_jax.cli.streaming_analyses import figure_of
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.studies.streaming.columns import columns, plot_columns
from lowrank_kv_jax.evals.studies.streaming.distributions import (
    QUANTILES,
    distributions,
    plot_distributions,
    shown_layer,
)
from lowrank_kv_jax.evals.studies.streaming.hyperparameters import Grid, grid_specs, printed_base, spreads
from lowrank_kv_jax.evals.studies.streaming.learned_layers import of_sides
from lowrank_kv_jax.evals.studies.streaming.learning_cost import prompt_costs
from lowrank_kv_jax.evals.studies.streaming.paired_gain import paired_gain
from lowrank_kv_jax.evals.studies.streaming.quality import Score, ablation_specs, opponents, with_prefill
from lowrank_kv_jax.evals.studies.streaming.reconstruction import means, reconstruction
from lowrank_kv_jax.evals.studies.streaming.speed import end_to_end, prefill_specs
from lowrank_kv_jax.methods.parse import parse_method

FULL, STATIC, STILL = "palu:rank=1.0", "palu:rank=0.5", "streamingkv:rank=0.5,eta=0,alpha=0.5"
MOVED, ENCODER = "streamingkv:rank=0.5,alpha=0.5", "streamingkv:rank=0.5,alpha=0.5,form=encoder,eta=0.3"
JOINT = "streamingkv:rank=0.5,alpha=0.5,head_group=1,update=joint"


@functools.cache
def fitted():
    """Methods, bases of one text, and two others."""
    methods = parse_methods([FULL, STATIC, STILL, MOVED, ENCODER, JOINT])
    moments = collect_moments(model(), np.asarray(prompts(4, 64)))
    bases = {spec: m.fit(PLAIN.attention, moments) for spec, m in methods.items()}
    return methods, bases, {name: np.asarray(prompts(1, 64, seed=seed)) for name, seed in (("a", 7), ("b", 8))}


def test_explained_variance_grows_with_columns_to_one_and_alignment_is_one_without_a_step():
    rows = columns(model(), *fitted())
    assert len(rows) == 6 * 2 * PLAIN.num_layers * 2
    for row in rows:
        if row.spec != ENCODER:  # an orthonormal basis; columns that read and write apart may take from what others gave
            assert np.diff(row.explained).min() > -1e-5, row.spec
        assert 0 <= row.at(0.5) <= 1 + 1e-5 and row.at(1.0) == row.explained[-1]
        if row.spec == FULL:
            assert row.explained[-1] == pytest.approx(1, abs=1e-5)
        if row.spec in (FULL, STATIC, STILL):
            np.testing.assert_allclose(row.aligned, 1, atol=1e-5)
            assert row.subspace == pytest.approx(1, abs=1e-5)
        else:
            resting = np.array(row.aligned)[: len(row.aligned) // 2]
            np.testing.assert_allclose(resting, 1, atol=1e-5)
            assert row.subspace < 0.999 and min(row.aligned) < 0.99, row.spec
    by = {(row.spec, row.text, row.layer, row.side): row for row in rows}
    for (spec, *where), row in by.items():
        if spec == MOVED:
            assert row.explained[-1] > by[STATIC, *where].explained[-1]


def test_columns_explain_what_is_rebuilt_of_tokens_around_their_mean():
    methods, bases, texts = fitted()
    seen = []

    def see(method, spec, bases, store, tokens):
        seen.append((method.frame(spec, bases, store), tokens))
        return 0.0, 0.0

    of_sides(model(), {MOVED: methods[MOVED]}, bases, texts, see)
    frame, (_, values) = seen[0]
    (row,) = [row for row in columns(model(), methods, bases, {"a": texts["a"]})
              if (row.spec, row.layer, row.side) == (MOVED, 0, "v")]
    x = np.asarray(values, np.float64)[0]
    basis = np.asarray(frame.v, np.float64)[0]
    x = (x - x.mean(0)).reshape(len(x), len(basis), -1)
    for count in (1, basis.shape[-1]):
        close = np.einsum("sjw,jwr,jur->sju", x, basis[..., :count], basis[..., :count])
        assert row.explained[count - 1] == pytest.approx(1 - np.sum((x - close) ** 2) / np.sum(x**2), abs=1e-4)


def test_tokens_are_distributed_around_what_reconstruction_means(tmp_path):
    methods, bases, texts = fitted()
    rows = distributions(model(), methods, bases, texts)
    assert [row.layer for row in rows].count(-1) == 6 * 2 * 2
    by = {(row.spec, row.text, row.layer, row.side): row for row in rows}
    for mean in reconstruction(model(), methods, bases, texts):
        row = by[mean.spec, mean.text, mean.layer, mean.side]
        assert len(row.cosine) == len(QUANTILES) and list(row.cosine) == sorted(row.cosine)
        assert row.cosine[0] - 1e-6 <= mean.cosine <= max(row.cosine[-1], 1) + 1e-6
        if mean.spec == FULL:
            assert row.cosine[0] == pytest.approx(1, abs=1e-5) and row.mse[-1] < 1e-8
        else:
            assert row.cosine[0] < row.cosine[-1] < 1 and 0 < row.mse[0] < row.mse[-1]
    layers = [row for row in rows if row.layer >= 0]
    assert {row.layer for row in layers} == set(range(PLAIN.num_layers)) and shown_layer(32) == 24
    plot_distributions(str(tmp_path / "d.png"), rows, "tiny")
    plot_columns(str(tmp_path / "c.png"), columns(model(), methods, bases, {"a": texts["a"]}), "tiny")
    assert {path.name for path in tmp_path.iterdir()} == {"c.png", "d.png"}


def test_taps_of_exact_prefill_tell_nothing_of_a_compressed_one():
    method = {"palu:prefill=compressed": parse_method("palu:prefill=compressed")}
    with pytest.raises(ValueError, match="palu:prefill=compressed: prefill='compressed' is not what is measured here"):
        reconstruction(model(), method, {}, {})
    assert means([]) == []


def test_the_grid_is_the_papers_and_its_spread_is_over_the_settings_of_a_text():
    specs = grid_specs(printed_base(0.5), Grid())
    assert len(set(specs)) == 24
    for spec, method in parse_methods(specs).items():
        assert (method.eta, method.iterations) == (method.eta_dec, method.iterations_dec) and method.step == 10, spec
    with pytest.raises(ValueError, match="alphas="):
        Grid(alphas=())
    nll = {"palu": [3.0, 2.0], "x": [2.0, 2.0], "y": [2.0, 1.0], "z": [3.5, 2.5]}
    rows = {spec: Score(spec, {}, {"code": own}, {}, {}, 1.0) for spec, own in nll.items()}
    (row,) = spreads(rows, "base", ["x", "y", "z"], "palu")
    assert (row.spec, row.text, row.settings) == ("base", "code", 3)
    assert (row.mean, row.std) == (pytest.approx(6.5 / 3), pytest.approx(np.std([2, 1.5, 3], ddof=1)))
    assert (row.least, row.most) == (-0.5, 1.0)


def test_ablations_may_attend_through_the_projections():
    exact, compressed = (with_prefill(ablation_specs(0.5), prefill) for prefill in ("exact", "compressed"))
    assert exact == ablation_specs(0.5)
    assert {method.attends_codes for method in parse_methods(compressed).values()} == {True}
    assert {method.attends_codes for method in parse_methods(exact).values()} == {False}


def test_methods_are_compared_where_prompts_attend_alike():
    specs = ["palu:rank=0.5", "palu:rank=0.5,rank_by=fisher-roots", "streamingkv:rank=0.5"]
    rows = {spec: Score(spec, {}, {}, {}, {}, 1.0) for spec in ["full", *specs, *with_prefill(specs, "compressed")]}
    found = opponents(rows)
    assert [why for *_, why in found] == ["uniform ranks", "the same ranks"] * 2
    assert [(spec, over) for spec, over, _ in found[2:]] == [
        (f"{spec},prefill=compressed", f"{over},prefill=compressed") for spec, over, _ in found[:2]]


@pytest.mark.slow
def test_prefill_and_decoding_are_timed_apart():
    specs = ["full", *prefill_specs(0.5)[-2:]]
    rows = end_to_end(model(), specs, 40, steps=4, rounds=2)
    assert [row.spec for row in rows] == specs
    for row in rows:
        assert len(row.prefill) == len(row.decode) == 2 and row.medians[0] == pytest.approx(np.mean(row.prefill))
        assert min(*row.prefill, *row.decode) > 0 and (row.length, row.steps) == (40, 4)
    with pytest.raises(ValueError, match="length=512: with 32 decoded tokens more than the context of 512"):
        end_to_end(model(), ["full"], 512)


def test_learning_costs_the_products_of_its_rule():
    """Of 48 tokens of 32 channels on two sides: a second moment, and in ten steps its and its deflation's products with
    eight columns; the rest is small."""
    still, moving = prompt_costs(model(), ["streamingkv:rank=0.5,eta=0,alpha=0.5", "streamingkv:rank=0.5,alpha=0.5"], 48, 2)
    for part in ("flops", "bytes"):
        assert getattr(still.attending, part) == getattr(moving.attending, part) > 0
        assert getattr(moving.coding, part) > getattr(still.coding, part)
    products = 2 * (2 * 48 * 32**2 + 10 * 2 * 2 * 32**2 * 8)
    for more in ((moving.flops - still.flops) / PLAIN.num_layers, moving.coding.flops - still.coding.flops):
        assert products < more < 1.5 * products
    assert still.attending_s == moving.attending_s > 0 and moving.seconds > 3 * moving.coding_s > 0
    with pytest.raises(ValueError, match="length=513: more than the context of 512"):
        prompt_costs(model(), ["full"], 513)
    with pytest.raises(ValueError, match="xkv: its layers are coded together"):
        prompt_costs(model(), ["xkv"], 48)


def test_gains_come_with_intervals_and_effect_sizes():
    rng = np.random.default_rng(0)
    others = {str(task): list(rng.normal(size=6)) for task in range(8)}
    better = {task: [x + 0.1 + 0.02 * rng.normal() for x in own] for task, own in others.items()}
    gain = paired_gain("a", "b", "", better, others)
    for won in (gain.by_task, gain.by_sample):
        assert won.effect == 1 and 0.08 < won.low < gain.mean < won.high < 0.12
    assert gain == paired_gain("a", "b", "", better, others) and gain != paired_gain("a", "b", "", better, others, seed=1)
    noise = {task: [x + rng.normal() for x in own] for task, own in others.items()}
    gain = paired_gain("a", "b", "", noise, others)
    assert gain.by_sample.low < 0 < gain.by_sample.high and abs(gain.by_sample.effect) < 0.5
    lone = paired_gain("a", "b", "", {"x": [2.0]}, {"x": [1.0]})
    assert (lone.by_sample.low, lone.by_sample.p, lone.median) == (None, None, 1.0)


def test_several_figures_have_names_of_their_own():
    class Args:
        plot, studies = "out/f.png", ["fisher", "speed"]

    assert figure_of(Args, "fisher") == "out/f.png"  # type: ignore[arg-type]
    Args.studies = ["fisher", "columns"]
    assert figure_of(Args, "columns") == "out/f-columns.png"  # type: ignore[arg-type]


def test_random_bases_serve_where_none_are_calibrated():
    method = parse_method(MOVED)
    rows = columns(model(), {MOVED: method}, {MOVED: bases_for(method, PLAIN)}, {"a": np.asarray(prompts(1, 40))})
    assert all(row.explained[-1] < 1 for row in rows)
