"""Basis estimators: one interface, oracles, and the bounds of the sketches."""

import argparse
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.cli import estimators as command
from lowrank_kv_jax.estimators import ESTIMATORS, make_estimator
from lowrank_kv_jax.estimators.estimator import start_moment
from lowrank_kv_jax.estimators.gha import gha_update, start_columns
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.studies.bases.estimators import stream_table
from lowrank_kv_jax.evals.studies.bases.piecewise_stream import piecewise_stream, segment_error
from lowrank_kv_jax.models.load import LoadedModel
from lowrank_kv_jax.testing.estimators import ESTIMATOR_PROMISES, LEAD, RANK, WIDTH, estimator_of, lost
from lowrank_kv_jax.testing.estimators import stream as tokens

every_estimator = pytest.mark.parametrize("name", sorted(ESTIMATORS))


def estimator(name, **fields):
    return make_estimator(name, **{"size": 8, **fields})


@functools.cache
def update_of(made):
    return jax.jit(made.update)


@functools.cache
def basis_of(made, rank=RANK):
    return jax.jit(functools.partial(made.basis, rank=rank))


def projector(made, learned):
    basis = np.asarray(basis_of(made)(learned))
    return basis @ basis.swapaxes(-1, -2)


gha = jax.jit(gha_update, static_argnames=("tail", "iterations", "orientation", "scale", "frozen_outputs"))


# ---- the interface ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("promise", ESTIMATOR_PROMISES, ids=lambda promise: promise.__name__)
@every_estimator
def test_the_contract(promise, name):
    promise(estimator_of(name, promise))


def test_eigenvectors_are_polished_to_the_last_bits():
    x = np.random.default_rng(0).normal(size=(2048, 64)) * np.geomspace(1, 1e-3, 64)
    u = np.asarray(principal_subspace(jnp.asarray(x.T @ x, jnp.float32), 48), np.float64)
    assert np.abs(u.T @ u - np.eye(48)).max() < 5e-7  # six times as much without
    assert lost(u, x) < 1.0001 * lost(np.linalg.svd(x)[2][:48].T, x)


@every_estimator
def test_what_is_refused_is_named(name):
    made = estimator(name)
    learned = made.init((), WIDTH)
    with pytest.raises(ValueError, match="rank=13: must lie in 1..12"):
        made.basis(learned, 13)
    if hasattr(made, "size"):
        with pytest.raises(ValueError, match="size=8: .* fewer directions than the rank 9"):
            made.basis(learned, 9)
        with pytest.raises(ValueError, match="size=0"):
            estimator(name, size=0)
    with pytest.raises(ValueError, match="estimator='pca': allowed are covariance, "):
        make_estimator("pca")


def test_completed_columns_are_orthonormal():
    start = jnp.asarray(np.linalg.qr(np.ones((6, 2)) + np.eye(6)[:, :2])[0], jnp.float32)
    columns = start_columns((), 6, 5, start)
    np.testing.assert_allclose(columns.T @ columns, np.eye(5), atol=1e-6)
    np.testing.assert_array_equal(columns[:, :2], start)


@pytest.mark.parametrize("name", ["covariance", "frequent_directions", "svd"])
def test_forgetting_scales_the_weight_of_the_past(name):
    made, (first, second) = estimator(name), (tokens(1), tokens(2))
    start = made.init(LEAD, WIDTH)
    faded = update_of(made)(jax.jit(made.forget)(update_of(made)(start, first), 0.0), second)
    fresh = update_of(made)(start, second)
    np.testing.assert_allclose(*(projector(made, s) for s in (faded, fresh)), atol=1e-4)


# ---- Frequent Directions ----------------------------------------------------------------------------------------


def spectral_norm(x):
    return np.linalg.norm(x, 2)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), decay=st.floats(0.3, 1.0), size=st.sampled_from([5, 9, WIDTH, 16]),
    batch=st.sampled_from([4, 60]), spike=st.booleans(),
)
def test_frequent_directions_keeps_its_bounds(seed, decay, size, batch, spike):
    """||A^T A - S^T S|| <= ||A - A_r||_F^2 / (l + 1 - r), S^T S <= A^T A, and ||A (I - P)||^2 <= s_{r+1}^2 + eps."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(60, WIDTH)) * decay ** np.arange(WIDTH)
    if spike:
        a[37] *= 50
    a = a.astype(np.float32)
    made = make_estimator("frequent_directions", size=size)
    learned = made.init((), WIDTH)
    for begin in range(0, 60, batch):
        learned = update_of(made)(learned, a[begin : begin + batch])
    a, s = a.astype(np.float64), np.asarray(learned.rows, np.float64)
    difference = a.T @ a - s.T @ s
    noise = 1e-5 * spectral_norm(a) ** 2
    values = np.linalg.svd(a, compute_uv=False)
    assert np.linalg.eigvalsh(difference).min() > -noise
    assert spectral_norm(difference) <= float(learned.shrunk) + noise
    for rank in range(1, min(size, WIDTH)):
        bound = (values[rank:] ** 2).sum() / (size + 1 - rank)
        assert spectral_norm(difference) <= bound + noise
        basis = np.asarray(basis_of(made, rank)(learned), np.float64)
        left = spectral_norm(a - a @ basis @ basis.T) ** 2
        assert left <= values[rank] ** 2 + bound + noise
    if size >= WIDTH:  # as many rows as channels hold everything
        assert float(learned.shrunk) == 0 and spectral_norm(difference) <= noise


def test_a_start_of_more_directions_than_rows_counts_in_the_bound():
    start = jnp.eye(16)[:, :8]
    learned = make_estimator("frequent_directions", size=4).init((), 16, start)
    lost = np.asarray(start_moment(start) - learned.rows.T @ learned.rows, np.float64)
    assert 0 < np.linalg.eigvalsh(lost)[-1] <= float(learned.shrunk) * (1 + 1e-6)


# ---- GHA --------------------------------------------------------------------------------------------------------


def sanger_steps(a, x, eta, iterations, tail):
    """Float64, column by column, from the sums of equation 9."""
    a = np.array(a, np.float64)
    width, rank = a.shape
    for _ in range(iterations):
        step = np.zeros_like(a)
        for sample in np.asarray(x, np.float64):
            h = a.T @ sample
            for i in range(rank):
                rebuilt = sum(a[:, j] * h[j] for j in range(i + 1))
                step[:, i] += h[i] * (sample - rebuilt)
        step[:, : rank - tail] = 0
        a += eta * step / len(x)
    return a


@pytest.mark.parametrize("iterations, tail", [(1, 4), (3, 2), (2, 0)])
def test_gha_equals_a_float64_least_lost(iterations, tail):
    x = tokens(lead=(), count=20)
    start = np.linalg.qr(np.random.default_rng(1).normal(size=(WIDTH, RANK)))[0]
    ours = gha(jnp.asarray(start, jnp.float32), x, None, 0.05, tail=tail, iterations=iterations, scale="mean")
    np.testing.assert_allclose(ours, sanger_steps(start, x, 0.05, iterations, tail), atol=2e-5)
    np.testing.assert_array_equal(ours[:, : RANK - tail], start.astype(np.float32)[:, : RANK - tail])


def test_the_printed_triangle_recovers_the_directions_in_reverse_order():
    """Equation 15 of StreamingKV with A [d, r] has the lower triangle: its last column leads."""
    x = tokens(lead=(), count=400)
    directions = np.linalg.svd(np.asarray(x))[2][:RANK]
    start = jnp.asarray(np.linalg.qr(np.random.default_rng(2).normal(size=(WIDTH, RANK)))[0], jnp.float32)
    for orientation, order in (("sanger", slice(None)), ("printed", slice(None, None, -1))):
        a = start
        for _ in range(40):
            a = gha(a, x, None, 0.4, iterations=10, orientation=orientation)
        cosines = np.abs(np.diag(directions[order] @ np.asarray(a)))
        assert cosines.min() > 0.99, orientation


def test_outputs_can_be_frozen_as_in_algorithm_1():
    x = tokens(lead=(), count=20)
    a = jnp.eye(WIDTH, RANK)
    h = np.asarray(x @ a, np.float64)
    expected = np.array(a, np.float64)
    for _ in range(3):  # y once, the triangle of y y^T, the moving basis
        expected = expected + 1e-4 * (np.asarray(x, np.float64).T @ h - expected @ np.triu(h.T @ h))
    ours = gha(a, x, None, 1e-4, iterations=3, scale="sum", frozen_outputs=True)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert np.abs(ours - gha(a, x, None, 1e-4, iterations=3, scale="sum")).max() > 1e-4


@pytest.mark.parametrize("name, fields, message", [
    ("gha", {"orientation": "up"}, "orientation='up': allowed are sanger, printed"),
    ("gha", {"scale": 7}, "scale=7: allowed are largest, mean, sum"),
    ("gha", {"tail": 9}, "tail=9: must be at most 8"),
    ("gha", {"iterations": 0}, "iterations=0: must be at least 1"),
    ("gha", {"iterations": 10**9}, "iterations=1000000000: must be at most 1000"),
    ("gha", {"eta": float("nan")}, "eta=nan: must be a finite number"),
    ("oja", {"eta": float("inf")}, "eta=inf: must be a finite number"),
    ("oja", {"eta": -1.0}, "eta=-1.0: must be at least 0"),
])
def test_an_estimator_refuses_fields_as_it_is_made(name, fields, message):
    with pytest.raises(ValueError, match=message):
        estimator(name, **fields)


def test_gha_refuses_what_it_does_not_know():
    a, x = jnp.eye(WIDTH, RANK), tokens(lead=())
    for wrong, message in (({"orientation": "up"}, "orientation='up'"), ({"scale": "one"}, "scale='one'"), ({"tail": 5}, "tail=5: must lie in 0..4")):
        with pytest.raises(ValueError, match=message):
            gha_update(a, x, None, 0.1, **wrong)


# ---- a stream whose subspace changes ----------------------------------------------------------------------------


@every_estimator
def test_following_a_changing_stream_beats_stopping_early(name):
    """StreamingKV, figure 3(a): a static basis is worst, following it while decoding best."""
    rank, errors = 6, {"static": [], "prefill": [], "decode": []}
    made = make_estimator(name, size=12)
    segments = piecewise_stream(segments=3, steps=12)
    step = update_of(made)
    learned = made.init((), 40)
    for _ in range(10):
        learned = step(learned, segments[0].prefill)
    basis = basis_of(made, rank)
    static = basis(learned)
    for segment in segments[1:]:
        learned = step(made.forget(learned, 0.02), segment.prefill)
        early = basis(learned)
        for batch in segment.decode:
            errors["static"].append(segment_error(static, segment))
            errors["prefill"].append(segment_error(early, segment))
            errors["decode"].append(segment_error(basis(learned), segment))
            learned = step(learned, batch)
    means = {key: np.mean(value) for key, value in errors.items()}
    assert means["static"] > 1.1 * means["prefill"] > 1.1 * 1.1 * means["decode"]


# ---- the comparison ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_comparison_measures_every_estimator(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")  # room for whole names
    tiny = LoadedModel("tiny", helpers.PLAIN, helpers.model().params, Characters(), "a" * 64)
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: tiny)
    monkeypatch.setattr("lowrank_kv_jax.evals.studies.bases.estimators.stream_table", functools.partial(stream_table, ["svd"], 1))
    for name in ("prose", "code"):
        (tmp_path / f"{name}.txt").write_text(f"some {name} text, " * 40)
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["estimators", "--length", "128", "--page", "16", "--json", str(tmp_path / "out.jsonl"),
                              "--texts", str(tmp_path / "prose.txt"), str(tmp_path / "code.txt")])
    assert args.run(args) == 0
    assert "frequent_directions" in capsys.readouterr().out
    records = read_records(tmp_path / "out.jsonl")
    assert {r["estimator"] for r in records if r["task"] == "k"} == set(ESTIMATORS)
    for record in records:
        if record["task"] in "kv":
            assert 0 < record["oracle"] <= record["after"] < 1 and record["bytes"] > 0 and record["update_ms"] > 0
    assert [r["bytes"] for r in records if r["estimator"] == "covariance"][:1] == [8 * 8 * 4]
