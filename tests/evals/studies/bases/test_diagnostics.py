"""Metrics against float64 NumPy, the tables on tiny models, and one fact of a real model's activations."""

import argparse
import functools

import helpers
import numpy as np
import pytest
from character_tokenizer import Characters

from lowrank_kv_jax import methods
from lowrank_kv_jax.calibration.calibrate import collect_moments, iterate_taps
from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.cli import diagnose
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.studies.bases import adapting, diagnostics, forgetting
from lowrank_kv_jax.evals.studies.bases.metrics import (
    principal_basis,
    rank_of_energy,
    reconstruction_cosine,
    residual_energy_ratio,
    second_moment,
    spectrum,
    subspace_overlap,
)
from lowrank_kv_jax.evals.studies.bases.plot import plot_diagnostics
from lowrank_kv_jax.models.load import LoadedModel, demo_model_path, load_model

RNG = np.random.default_rng(0)


def tokens_of(*shape):
    return RNG.normal(size=shape) * np.linspace(2.0, 0.1, shape[-1])


def random_basis(*shape):
    return np.linalg.qr(RNG.normal(size=shape))[0]


# ---- metrics


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_rer_from_moments_is_the_rer_of_the_tokens(rank):
    x, u = tokens_of(2, 3, 50, 12), random_basis(2, 3, 12, rank)
    left = x - x @ u @ u.swapaxes(-1, -2)
    want = (left**2).sum((-2, -1)) / (x**2).sum((-2, -1))
    np.testing.assert_allclose(residual_energy_ratio(second_moment(x), u), want, atol=1e-12)


def test_rer_holds_for_columns_that_rounding_left_skew():
    x, u = tokens_of(50, 12), random_basis(12, 5) + 0.01 * RNG.normal(size=(12, 5))
    want = np.sum((x - x @ u @ u.T) ** 2) / np.sum(x**2)
    np.testing.assert_allclose(residual_energy_ratio(second_moment(x), u), want, atol=1e-12)


def test_the_principal_basis_has_the_least_rer_which_is_the_tail_of_the_spectrum():
    moment = second_moment(tokens_of(4, 50, 12))
    oracle = residual_energy_ratio(moment, principal_basis(moment, 5))
    np.testing.assert_allclose(oracle, spectrum(moment)[:, 5:].sum(-1), atol=1e-12)
    assert (oracle < residual_energy_ratio(moment, random_basis(4, 12, 5))).all()


def test_metrics_of_nothing_are_zero_and_not_nan():
    zero = np.zeros((12, 12))
    assert residual_energy_ratio(zero, random_basis(12, 5)) == 0
    assert spectrum(zero).sum() == 0
    assert reconstruction_cosine(np.zeros((3, 12)), np.zeros((3, 12))) == 0


def test_overlap_is_the_mean_squared_cosine_of_principal_angles():
    first, second = random_basis(3, 12, 5), random_basis(3, 12, 5)
    cosines = np.linalg.svd(first.swapaxes(-1, -2) @ second, compute_uv=False)
    np.testing.assert_allclose(subspace_overlap(first, second), (cosines**2).mean(-1), atol=1e-12)
    turned = first @ np.linalg.qr(RNG.normal(size=(5, 5)))[0]
    np.testing.assert_allclose(subspace_overlap(first, turned), 1.0, atol=1e-12)
    complement = np.linalg.qr(np.concatenate([first[0], RNG.normal(size=(12, 7))], axis=1))[0][:, 5:]
    np.testing.assert_allclose(subspace_overlap(first[0], complement), 0.0, atol=1e-12)


def test_spectrum_is_the_squared_singular_values():
    x = tokens_of(2, 50, 12)
    values = np.linalg.svd(x, compute_uv=False) ** 2
    np.testing.assert_allclose(spectrum(second_moment(x)), values / values.sum(-1, keepdims=True), atol=1e-12)


def test_rank_of_energy_counts_components():
    moment = np.diag([5.0, 3.0, 1.0, 1.0])
    energies = (0.4, 0.5, 0.51, 0.8, 0.9, 1.0)
    assert [int(rank_of_energy(moment, energy)) for energy in energies] == [1, 1, 2, 2, 3, 4]
    with pytest.raises(ValueError, match="energy=0"):
        rank_of_energy(moment, 0)


def test_cosine_is_the_mean_over_tokens():
    x, y = tokens_of(2, 7, 12), tokens_of(2, 7, 12)
    want = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*pair, strict=True)]
            for pair in zip(x, y, strict=True)]
    np.testing.assert_allclose(reconstruction_cosine(x, y), np.mean(want, axis=1), atol=1e-12)


# ---- tables


@functools.cache
def tiny_tables():
    model = helpers.model()
    tests = {name: np.asarray(helpers.prompts(n, 48, seed=n)) for name, n in (("one", 2), ("two", 1))}
    calibration = collect_moments(model, np.asarray(helpers.prompts(2, 48)))
    specs = ("static-pca-h:rank=4", "ojakv:rank=4,top=1.0,eta_pre=0.5", "single-svd:rank=8,sinks=0,recent=0")
    return (
        tests, diagnostics.compressibility_table(model, calibration, tests, layers=2),
        adapting.adaptation_table(model, calibration, tests, specs),
        diagnostics.spectra_table(model, calibration),
    )


def test_the_compressibility_table_holds_every_kind_on_every_text():
    tests, table, _, _ = tiny_tables()
    kinds = {row["kind"] for row in table}
    assert len(kinds) == len(diagnostics.KINDS) + 4 and len(table) == len(kinds) * len(tests)
    for row in table:
        assert 0 <= row["oracle"] <= 1
        if row["static"] is not None:
            assert row["oracle"] <= row["static"] <= 1
            assert np.shape(row["static_per_layer"]) == np.shape(row["oracle_per_layer"])
            np.testing.assert_allclose(np.mean(row["static_per_layer"]), row["static"])


def test_the_cross_layer_oracle_is_the_svd_of_the_layers_side_by_side():
    tests, table, _, _ = tiny_tables()
    config, params = helpers.model().config, helpers.model().params
    sides = [[] for _ in range(2)]
    for window in tests["one"]:
        for layer, taps in enumerate(iterate_taps(config, params, window[None])):
            if layer < 2:
                sides[layer].append(np.asarray(taps.v[0], np.float64).reshape(48, -1))
    values = np.linalg.svd(np.concatenate([np.concatenate(s) for s in sides], axis=1), compute_uv=False) ** 2
    row = next(r for r in table if r["text"] == "one" and r["kind"].startswith("values, jointly over 2"))
    assert (row["rank"], row["width"]) == (16, 64)
    np.testing.assert_allclose(row["oracle"], values[16:].sum() / values.sum(), rtol=1e-5)


def test_the_adaptation_table_compares_bases_with_the_oracle():
    tests, _, table, _ = tiny_tables()
    assert len(table) == 3 * 2 * len(tests)
    for row in table:
        heads = helpers.PLAIN.kv_heads if row["method"].startswith("static-pca-h") else 1
        assert np.shape(row["rer_per_layer"]) == (helpers.PLAIN.num_layers, heads)
        assert row["oracle_rer"] <= row["rer"] + 1e-6 and 0 <= row["overlap"] <= 1 + 1e-6
        if row["method"].startswith("single-svd"):
            np.testing.assert_allclose((row["rer"], row["overlap"]), (row["oracle_rer"], 1.0), atol=1e-4)


def test_methods_without_a_basis_cannot_be_compared():
    moments = helpers.random_moments(helpers.PLAIN)
    with pytest.raises(ValueError, match="'full' has no one basis"):
        adapting.adaptation_table(helpers.model(), moments, {}, [methods.Full()])


def test_chunks_forget_nothing_and_full_rank_loses_nothing():
    """Chunks have several bases a layer: what they hold is rebuilt in each token's own, on either side of RoPE."""
    model, moments = helpers.model(), helpers.random_moments(helpers.PLAIN)
    chunks = "sinks=4,recent=8,chunk_length=32"
    specs = [f"osp:rank=1.0,rope=pre,{chunks}", f"osp:rank=4,rope=post,{chunks}"]
    prompt, later = (np.asarray(helpers.prompts(1, n, seed=n)) for n in (40, 64))
    table = forgetting.forgetting_table(model, moments, prompt, later, specs, (0, 2))
    errors = {(row["method"], row["of"], row["refreshes"]): [row[x] for x in ("rer_k", "rer_v", "logit_error")]
              for row in table}
    for spec in {row["method"] for row in table}:
        before, after = (errors[spec, "prompt", n] for n in (0, 2))
        if "rank=4" in spec:
            # the prompt's last tokens are exact at first, and count later
            assert 0 < before[0] < 1 and np.allclose(before, after, rtol=0.5) and errors[spec, "later", 2][0] > 0
        else:
            assert max(*before, *after, *errors[spec, "later", 2]) < 1e-4


def test_spectra_fall_and_the_picture_is_drawn(tmp_path):
    _, _, adaptation, spectra = tiny_tables()
    for row in spectra:
        assert np.shape(row["spectrum"]) == (3, 4, 8) and (np.diff(row["spectrum"], axis=-1) <= 1e-12).all()
        assert (np.array(row["ranks"]["0.9"]) <= np.array(row["ranks"]["0.99"])).all()
    plot_diagnostics(str(tmp_path / "spectra.png"), spectra, adaptation)
    assert (tmp_path / "spectra.png").stat().st_size > 10_000


# ---- the command


def test_the_command_measures_prints_and_records(tmp_path, monkeypatch, capsys):
    tiny = LoadedModel("tiny", helpers.PLAIN, helpers.model().params, Characters(), "a" * 64)
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: tiny)
    for name in ("prose", "shifted"):
        (tmp_path / f"{name}.txt").write_text(f"some {name} text, " * 40)
    parser = argparse.ArgumentParser()
    diagnose.add_parser(parser.add_subparsers())
    args = parser.parse_args([
        "diagnose", "--calibrate", str(tmp_path / "prose.txt"), "--test", str(tmp_path / "shifted.txt"),
        "--methods", "ojakv:rank=4", "--length", "48", "--windows", "2", "--layers", "2", "--refreshes", "0", "2", "9999",
        "--json", str(tmp_path / "out.jsonl"), "--plot", str(tmp_path / "out.png"),
    ])
    too_long = parser.parse_args(["diagnose", "--length", "999"])
    with pytest.raises(ValueError, match="^--length 999: must be at most 512, the model's context of 512 tokens"):
        too_long.run(too_long)
    assert args.run(args) == 0
    assert "ojakv:rank=4" in capsys.readouterr().out
    records = read_records(tmp_path / "out.jsonl")
    assert {record["task"] for record in records} == {"compressibility", "adaptation", "rest", "forgetting", "spectra"}
    assert all(record["model"] == "tiny" and record["calibration_sha256"] for record in records)
    assert (tmp_path / "out.png").is_file()


# ---- real activations


@pytest.mark.slow
def test_an_adapted_basis_loses_less_of_shifted_text_than_the_calibrated_one():
    """OjaKV's table 1 on a real model, prose to code, keys and values, with the default normalisation."""
    try:
        demo_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    model = load_model("smollm2-135m")
    prose = token_windows(model.tokenizer, load_corpus("pydoc").texts, 512, 1)
    code = token_windows(model.tokenizer, load_corpus("python").texts, 512, 1)
    specs = ("static-pca-h:rank=0.5", "ojakv:rank=0.5,top=1.0")
    table = adapting.adaptation_table(model, collect_moments(model, prose), {"code": code}, specs)
    rer = {(row["method"].split(":")[0], row["side"]): row["rer"] for row in table}
    oracle = {row["side"]: row["oracle_rer"] for row in table}
    for side in ("k", "v"):
        assert oracle[side] < rer["ojakv", side] < 0.99 * rer["static-pca-h", side]
