"""Principal subspaces without a decomposition keep what LAPACK's keep, and a refresh on an accelerator decomposes nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, bases_for, small_configuration

from lowrank_kv_jax.estimators import make_estimator, svd
from lowrank_kv_jax.estimators.by_products import iterated_subspace, leading_factor
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.generation.groups import refresh_group
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.parse import parse_method

WIDTH = 64
INDEX = np.arange(WIDTH)
SPECTRA = {
    "harmonic": 1 / (1 + INDEX),
    "steep": np.exp(-INDEX / 3),
    "gentle": np.exp(-INDEX / 20),
    "flat": np.ones(WIDTH),
    "linear": np.linspace(1, 0.1, WIDTH),
    "outliers": np.where(INDEX < 3, 100.0, 1 / np.sqrt(1 + INDEX)),
    "deficient": np.where(INDEX < 10, 1.0, 0.0),
    "repeated": 10.0 ** -np.minimum(INDEX / 2, 9),
    "steps": np.select([INDEX < 1, INDEX < 5, INDEX < 9], [1e6, 1e3, 1.0], 1e-6),
    "nothing": np.zeros(WIDTH),
}


def moment_of(spectrum, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)))
    return (q * spectrum) @ q.T


@pytest.mark.parametrize("rank", [16, 64])
def test_the_residual_energy_is_that_of_eigh(rank):
    """All spectra as one batch, each scaled by another power of ten."""
    moments = np.stack([moment_of(s) * 10.0 ** (3 * (i % 8) - 9) for i, s in enumerate(SPECTRA.values())])
    found = np.asarray(jax.jit(iterated_subspace, static_argnums=1)(jnp.asarray(moments, jnp.float32), rank), np.float64)
    np.testing.assert_allclose(found.mT @ found, np.broadcast_to(np.eye(rank), (len(moments), rank, rank)), atol=2e-5)
    total = np.trace(moments, axis1=1, axis2=2)
    left = total - np.trace(found.mT @ moments @ found, axis1=1, axis2=2)
    best = np.linalg.eigvalsh(moments)[:, : WIDTH - rank].clip(0).sum(1)
    assert np.all(left <= 1.02 * best + 3e-6 * total)


def test_leading_directions_come_first():
    spectrum = np.where(INDEX < 4, [8.0, 4.0, 2.0, 1.0] + [0.0] * (WIDTH - 4), 0.01)
    moment = moment_of(spectrum)
    found = np.asarray(jax.jit(iterated_subspace, static_argnums=1)(jnp.asarray(moment, jnp.float32), 8), np.float64)
    np.testing.assert_allclose(np.diag(found.T @ moment @ found)[:4], spectrum[:4], rtol=1e-3)


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 48)), 12, 64])
def test_a_factor_keeps_what_a_decomposition_keeps(size):
    """Of any spectrum: what is missing is no larger than the direction behind, nothing is invented, and shrinking shrinks."""
    rng = np.random.default_rng(size)
    drawn = [rng.uniform(0.01, 1, WIDTH) ** rng.uniform(0.5, 8) * 10.0 ** rng.uniform(-6, 6) for _ in range(16)]
    moments = np.stack([moment_of(np.sort(s)[::-1], i) for i, s in enumerate([*SPECTRA.values(), *drawn])])
    total, values = np.trace(moments, axis1=1, axis2=2), np.linalg.eigvalsh(moments)[:, ::-1].clip(0)
    behind = values[:, size] if size < WIDTH else np.zeros(len(moments))
    for shrink in (False, True):
        factor = jax.jit(leading_factor, static_argnums=1, static_argnames="shrink")
        rows, lost = factor(jnp.asarray(moments, jnp.float32), size, shrink=shrink)
        assert rows.shape == (len(moments), size, WIDTH)
        rows, lost = np.asarray(rows, np.float64), np.asarray(lost, np.float64)
        missing = np.linalg.eigvalsh(moments - rows.mT @ rows)
        assert np.all(missing[:, -1] <= 1.25 * behind + 1e-5 * total)
        assert np.all(missing[:, 0] >= -(1e-5 if shrink else 1e-3) * total)
        assert np.all(np.abs(lost - shrink * behind) <= 0.25 * behind + 1e-5 * total)


def on_an_accelerator(monkeypatch):
    for module in ("svd", "linalg", "frequent_directions"):
        monkeypatch.setattr(f"lowrank_kv_jax.estimators.{module}.platform", lambda: "gpu")


@pytest.mark.parametrize("name", ["frequent_directions", "svd"])
def test_a_stream_is_sketched_as_well_without_decompositions(name, monkeypatch):
    """Ten updates of eight rows: the error of the sketch, and the energy that its basis leaves, against LAPACK's."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 10, 20, WIDTH)) * np.exp(-INDEX / np.linspace(4, 40, 8)[:, None, None, None])
    x = jnp.asarray(x @ np.linalg.qr(rng.normal(size=(8, 1, WIDTH, WIDTH)))[0], jnp.float32)
    made, rank = make_estimator(name, size=24), 16
    moment = np.einsum("bntv,bntw->bvw", *[np.asarray(x, np.float64)] * 2)

    def sketched():
        learned, update = made.init((8,), WIDTH), jax.jit(made.update)
        for batch in x.swapaxes(0, 1):
            learned = update(learned, batch)
        rows, basis = (np.asarray(y, np.float64) for y in (learned.rows, jax.jit(made.basis, static_argnums=1)(learned, rank)))
        left = np.trace(moment, axis1=1, axis2=2) - np.trace(basis.mT @ moment @ basis, axis1=1, axis2=2)
        return np.linalg.norm(moment - rows.mT @ rows, 2, axis=(1, 2)), left

    (error, left), _ = sketched(), on_an_accelerator(monkeypatch)
    other_error, other_left = sketched()
    noise = 1e-5 * np.trace(moment, axis1=1, axis2=2)
    assert np.all(other_error <= 1.05 * error + noise) and np.all(other_left <= 1.02 * left + noise)
    assert not np.array_equal(error, other_error)  # else it is the same way twice


def test_the_spectrum_that_scales_steps_is_nearly_that_of_eigh(monkeypatch):
    moments = jnp.asarray(np.stack([moment_of(s) for s in SPECTRA.values()]), jnp.float32)
    exact = np.asarray(jax.jit(svd.spectrum)(moments))
    on_an_accelerator(monkeypatch)
    found = np.asarray(jax.jit(lambda x: svd.spectrum(x))(moments))
    assert np.all(np.diff(found) >= 0) and np.all(np.abs(found - exact).max(1) <= 0.1 * exact[:, -1] + 1e-6)


@pytest.mark.parametrize("spec", [
    "osp", "xkv:recompress=8,sinks=4,recent=8", "osp:paper",  # the last one by Frequent Directions
    *(pytest.param(f"osp:estimator={name}", marks=pytest.mark.slow) for name in ("svd", "oja", "gha")),
])
def test_a_refresh_on_an_accelerator_decomposes_nothing(spec, monkeypatch):
    """Where chunks open and merge, where tokens that have gathered are compressed anew."""
    method = small_configuration(REGISTRY[spec]) if spec in REGISTRY else parse_method(spec)
    bases = bases_for(method, PLAIN)

    def lowered(batch):
        layout = make_layout(PLAIN, batch, 96, CAPACITY, 16, jnp.float32)
        group = machine_of(method).default_bases(PLAIN.attention)[0] if bases is None else bases[0]
        state = jax.eval_shape(lambda: machine_of(method).init(layout, group))
        return set(re.findall(r"lapack_s(syevd|geqrf|orgqr)", refresh_group.lower(method, layout, group, state).as_text()))

    assert "syevd" in lowered(5)  # what a CPU does
    on_an_accelerator(monkeypatch)
    assert not lowered(7)
