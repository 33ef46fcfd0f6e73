"""What layers share: CKA, cosine, ranks of groups, and the costs of a shared basis."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import PLAIN, model, prompts

from lowrank_kv_jax.attention.spec import LatentSpec
from lowrank_kv_jax.evals.speed import machine_rates
from lowrank_kv_jax.evals.speed.timing import Timing
from lowrank_kv_jax.evals.studies.cross_layer import cost
from lowrank_kv_jax.evals.studies.cross_layer.analysis import analyse, cka_matrix, cosine_matrix, group_ranks
from lowrank_kv_jax.evals.studies.cross_layer.cost import Cost, attention_flops, break_even, measure_costs, smaller_at
from lowrank_kv_jax.evals.studies.cross_layer.latents import _coefficients, _compare, pair_similarity
from lowrank_kv_jax.evals.studies.cross_layer.plot import plot_analysis, plot_pairs
from lowrank_kv_jax.evals.studies.cross_layer.quality import Settings, equal_bytes_specs, one_sided_specs
from lowrank_kv_jax.methods.parse import parse_method


def random_layers(layers=3, tokens=40, width=12):
    return np.random.default_rng(0).normal(size=(layers, tokens, width)).astype(np.float32)


def test_cka_is_the_paper_s_formula():
    x = random_layers()
    tokens = x.shape[1]
    centre = np.eye(tokens) - 1 / tokens
    grams = [centre @ layer.astype(np.float64) @ layer.T @ centre for layer in x]
    expected = [[np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)) for b in grams] for a in grams]
    np.testing.assert_allclose(cka_matrix(x), expected, atol=1e-5)


def test_rotated_layers_have_one_basis_but_other_tokens():
    """The observation of section 3: CKA sees what the cosine of tokens does not."""
    (first,) = random_layers(1)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))[0].astype(np.float32)
    x = np.stack([first, first @ rotation])
    assert cka_matrix(x)[0, 1] > 0.999 and abs(cosine_matrix(x)[0, 1]) < 0.5
    assert group_ranks(x, 2, 0.999) == [(12, 24)] and group_ranks(x, 1, 0.999) == [(12, 12)] * 2


def test_cosine_is_the_mean_over_tokens():
    x = random_layers()
    a, b = x[0], x[2]
    expected = np.mean(np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1))
    np.testing.assert_allclose(cosine_matrix(x)[0, 2], expected, atol=1e-6)


def test_analysis_of_a_model(tmp_path):
    analysis = analyse(model(), prompts()[0], sizes=(1, 2, 3), energy=0.9)
    assert analysis.cka["keys"].shape == (3, 3)
    np.testing.assert_allclose(np.diag(analysis.cka["values"]), 1, atol=1e-5)
    method = parse_method(f"xkv:group=2,table={analysis.table(2)}")
    groups = method.default_bases(PLAIN.attention)
    assert [group.ranks.k for group in groups] == [rank for rank, _ in analysis.ranks["keys"][2]]
    plot_analysis(tmp_path / "figure.png", analysis)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    json.dumps({side: ranks for side, ranks in analysis.ranks.items()})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sizes": (4,)}, "group size 4: the model has 3 layers"),
        ({"sizes": (1,), "energy": 1.5}, "energy=1.5"),
    ],
)
def test_bad_questions_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        analyse(model(), prompts()[0], **options)


def test_texts_of_a_single_token_are_refused():
    with pytest.raises(ValueError, match="tokens of shape"):
        analyse(model(), prompts()[0, :1], sizes=(1,))


def test_a_turn_brings_layers_together_that_share_a_space_and_merging_then_loses_nothing():
    (first,) = random_layers(1)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))[0].astype(np.float32)
    cosine, lost, turned, turned_lost, cka = map(float, _compare(first, first @ rotation))
    assert abs(cosine) < 0.5 and lost > 0.3
    assert (turned, cka) == (pytest.approx(1, abs=1e-4), pytest.approx(1, abs=1e-4)) and turned_lost < 1e-5
    cosine, lost, turned, *_ = map(float, _compare(*random_layers(2, tokens=2000)))
    assert abs(cosine) < 0.05 and turned < 0.2 and 0.5 < lost < 0.7  # right angles: the mean of 2 - 2 cos 36, 2 - 2 cos 54


def test_coefficients_do_not_depend_on_the_space_that_a_layer_writes_in():
    (first,) = random_layers(1)
    first = first * np.linspace(3, 0.5, 12, dtype=np.float32) + 0.5
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))[0].astype(np.float32)
    np.testing.assert_allclose(_coefficients(first @ rotation, 5), _coefficients(first, 5), atol=1e-3)


def test_adjacent_layers_are_compared_as_keys_values_and_latents(tmp_path):
    rows = {row.what: row for row in pair_similarity(model(), prompts()[0], 0.5)}
    assert set(rows) == {"keys as cached", "keys", "values", "coefficients of keys", "coefficients of values"}
    analysis = analyse(model(), prompts()[0], sizes=(1,))
    for side in ("keys", "values"):
        assert rows[side].width == 2 * rows[f"coefficients of {side}"].width
        np.testing.assert_allclose(rows[side].cosine, np.diagonal(analysis.cosine[side], 1), atol=1e-4)
        np.testing.assert_allclose(rows[side].cka, np.diagonal(analysis.cka[side], 1), atol=1e-4)
    for row in rows.values():
        assert all(np.array(row.turned) > row.cosine) and all(np.array(row.turned_lost) < row.lost), row.what
    plot_pairs(tmp_path / "pairs.png", list(rows.values()))
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="rank=1.5: must lie in"):
        pair_similarity(model(), prompts()[0], 1.5)


def test_break_even_is_where_the_bases_are_paid_for():
    spec = PLAIN.attention
    method = parse_method("xkv:group=3,rank=0.25,sinks=0,recent=0")
    length = break_even(method, spec, 2.0)
    assert smaller_at(method, spec, length) >= 2.0 > smaller_at(method, spec, length - 1)
    compact = parse_method("xkv:group=3,rank=0.25,sinks=0,recent=0,bits=8,basis_dtype=int8")
    assert break_even(compact, spec, 2.0) < length
    assert break_even(method, spec, 100.0) is None


def test_attention_flops():
    # one token, 3 layers: rebuild 2 R_k K D, logits 2 N D, values 2 N R_v
    assert attention_flops(PLAIN.attention, 1, 5, 7) == 3 * 2 * (5 * 32 + 8 * 8 + 8 * 7)


def test_the_floor_is_the_slower_of_compute_and_traffic_and_the_layers():
    cost = Cost(1.1, 1.0, 0.5, 0.4, 0.1, flops=3e9, bytes=10**9, matmul_rate=1e10, copy_rate=1e10)
    assert cost.overhead == pytest.approx(0.1) and cost.floor == pytest.approx(0.4)


def test_rates_are_medians_of_the_rounds_that_contenders_took():
    def rounds(*seconds):
        return Timing((0.0,) * len(seconds), seconds, steps=8)

    times = {machine_rates.PRODUCT: rounds(1.0, 2.0, 9.0), machine_rates.COPY: rounds(4.0)}
    products, copies = machine_rates.rates(times)
    assert products == pytest.approx(2 * machine_rates.SIDE**3 * machine_rates.TIMES / 2.0)
    assert copies == pytest.approx(8 * machine_rates.NUMBERS * machine_rates.TIMES / 4.0)


def test_rate_contenders_do_the_work_that_is_counted(monkeypatch):
    monkeypatch.setattr(machine_rates, "SIDE", 32)
    monkeypatch.setattr(machine_rates, "NUMBERS", 1000)
    for contender in machine_rates.rate_contenders().values():
        assert contender.round()[1] > 0
        held = np.asarray(contender._held)
    assert held.shape == (1000,) and held[0] == 1 + machine_rates.TIMES


@pytest.mark.slow
def test_costs_of_a_tiny_model_are_measured():
    (cost,) = measure_costs(model(), {"x": parse_method("xkv:group=3,sinks=2,recent=2")}, 64, steps=4, rounds=1).values()
    assert cost.ttft > 0 and cost.decode > 0 and cost.layers > 0 and cost.floor > cost.layers
    assert cost.bytes > 0 and cost.flops == attention_flops(PLAIN.attention, 64, 16, 32)


@pytest.mark.parametrize("spec, words", [
    *((spec, "stores no bases of keys and values with 128 tokens") for spec in ("kivi:bits=4", "full", "minicache:start=0")),
    ("snapkv:keep=0.5", "stores no bases of keys and values"), ("ojakv", "reads calibrated bases"),
])
def test_costs_of_what_fits_no_bases_are_refused_before_anything_is_timed(spec, words, monkeypatch):
    monkeypatch.setattr(cost, "alternate", None)
    with pytest.raises(ValueError, match=f"^{spec}: {words}"):
        measure_costs(model(), {spec: parse_method(spec)}, 128)


def test_costs_are_not_of_latents():
    spec = dataclasses.replace(PLAIN.attention, q_heads=4, kv_heads=1, head_dim=24, latent=LatentSpec(16, 1e-6))
    with pytest.raises(ValueError, match="xkv: this model caches latents"):
        cost.ranks_of({"xkv": parse_method("xkv")}, spec, 128)


def test_compared_methods_have_equal_bytes():
    settings = Settings(ratios=(2.0, 3.0), groups=(1, 3), fields="sinks=4,recent=4")
    specs = equal_bytes_specs(settings)
    assert specs[0] == "full" and len(specs) == 2 + 2 * 2
    for spec in specs[2:]:
        wanted = float(spec.split("smaller=")[1].split(",")[0])
        assert wanted <= smaller_at(parse_method(spec), PLAIN.attention, 400) < 1.25 * wanted


def test_one_side_alone_meets_its_ratio():
    """Coefficients and bases of the compressed side, counted anew; the other side keeps all of its columns."""
    length, settings = 400, Settings(ratios=(2.0, 4.0), groups=(1, 3))
    specs = one_sided_specs(PLAIN.attention, settings, length)
    assert len(specs) == 1 + 2 * 2 * 2
    for spec in specs[1:]:
        (first, *_) = parse_method(spec).default_bases(PLAIN.attention)
        width = first.layers * 32
        rank, other = sorted(first.ranks)
        assert other == width
        ratio = length * width / (rank * (length + width))
        assert any(wanted <= ratio < 1.3 * wanted for wanted in settings.ratios)
