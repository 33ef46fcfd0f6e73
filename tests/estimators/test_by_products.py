"""Principal subspaces without a decomposition keep what LAPACK's keep, and a refresh on an accelerator decomposes nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, bases_for, small_configuration

from lowrank_kv_jax.estimators.by_products import iterated_subspace
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
    "nothing": np.zeros(WIDTH),
}


def moment_of(spectrum, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)))
    return (q * spectrum) @ q.T


@pytest.mark.parametrize("rank", [16, 64])
def test_the_residual_energy_is_that_of_eigh(rank):
    """All spectra as one batch, each scaled by another power of ten."""
    moments = np.stack([moment_of(s) * 10.0 ** (3 * i - 9) for i, s in enumerate(SPECTRA.values())])
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


@pytest.mark.parametrize("spec", ["osp", "xkv:recompress=8,sinks=4,recent=8"])
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
    for module in ("svd", "linalg"):
        monkeypatch.setattr(f"lowrank_kv_jax.estimators.{module}.platform", lambda: "gpu")
    assert not lowered(7)
