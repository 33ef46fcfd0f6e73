"""Factorisations of batches: right, and never more than one matrix in a LAPACK call on a CPU."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, bases_for, small_configuration

from lowrank_kv_jax.estimators import linalg
from lowrank_kv_jax.estimators.host_eigh import host_eigh, remembering
from lowrank_kv_jax.generation.forward import make_layout, refresh_group
from lowrank_kv_jax.methods import REGISTRY, machine_of

needs_one_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.device_count() > 1, reason="only a single CPU device splits its batches"
)
FUNCTIONS = {
    "eigenvalues": (linalg.eigenvalues, np.linalg.eigvalsh),
    "cholesky": (linalg.cholesky, np.linalg.cholesky),
    "projector": (
        lambda x: linalg.orthonormalise(x[..., :3]) @ linalg.orthonormalise(x[..., :3]).mT,
        lambda x: np.linalg.qr(x[..., :3])[0] @ np.swapaxes(np.linalg.qr(x[..., :3])[0], -1, -2),
    ),
    "diagonal": (lambda x: linalg.eigenvectors(x).mT @ x @ linalg.eigenvectors(x),
                 lambda x: np.linalg.eigvalsh(x)[..., None] * np.eye(5)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("batch", [(), (1,), (3, 2)])
def test_every_matrix_of_a_batch(name, batch):
    ours, theirs = FUNCTIONS[name]
    x = np.random.default_rng(0).normal(size=(*batch, 5, 5))
    x = x @ np.swapaxes(x, -1, -2) + np.eye(5)
    np.testing.assert_allclose(jax.jit(ours)(jnp.asarray(x, jnp.float32)), theirs(x), atol=1e-4)


@pytest.mark.parametrize("spectrum", [[1.0, 0.5, 0.1], [1.0] * 64, [2.0] * 127 + [1.0], [3e4, 1.0], [1e-30, 1e-31]])
def test_the_least_eigenvalue_is_never_too_high(spectrum):
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(len(spectrum), len(spectrum))))
    matrix = jnp.asarray((q * spectrum) @ q.T, jnp.float32)
    found = float(jax.jit(linalg.least_eigenvalue)(matrix[None])[0])
    assert (1 - np.log(len(spectrum)) / 256) * spectrum[-1] * (1 - 1e-3) <= found <= 1.001 * spectrum[-1]


DECOMPOSED = {"osp": {"syevd"}}
"""Whose refresh decomposes: a chunk that opens takes the principal directions of what came before, in order."""


@pytest.mark.parametrize("spectrum", [[1.0, 0.5, 0.1], [1.0] * 64, [1.0] + [0.99] * 127, [3e4, 1.0], [1e-30, 1e-31], [0.0, 0.0]])
def test_the_largest_eigenvalue_is_at_most_2_percent_too_low(spectrum):
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(len(spectrum), len(spectrum))))
    matrix = jnp.asarray((q * spectrum) @ q.T, jnp.float32)
    found = float(jax.jit(linalg.largest_eigenvalue)(matrix[None])[0])
    assert 0.98 * spectrum[0] <= found <= 1.0001 * spectrum[0]


def lapack_batches(hlo: str) -> list[int]:
    """Matrices in each LAPACK call of a compiled program."""
    calls = re.findall(r"= \(?\w+\[([\d,]*)\].* custom-call\(.*custom_call_target=\"lapack_", hlo)
    return [math.prod(int(d) for d in dims.split(",")[:-2]) for dims in calls]


DECOMPOSING = {"full", "minicache", "ojakv", "osp", "transform", "xkv"}
"""By default those whose bases move or are fitted, and one each whose refresh has nothing to do and that packs tokens."""


@needs_one_cpu
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in DECOMPOSING else pytest.mark.slow) for name in sorted(REGISTRY)])
def test_a_refresh_waits_for_no_thread(name):
    """Two batched LAPACK calls at a time hang a machine of two cores for ever."""
    method = small_configuration(REGISTRY[name])
    layout = make_layout(PLAIN, 3, 96, CAPACITY, 16, jnp.float32)
    bases = bases_for(method, PLAIN)
    group = bases[0] if bases is not None else None
    state = jax.eval_shape(lambda: machine_of(method).init(layout, group))
    hlo = refresh_group.lower(method, layout, group, state).compile().as_text()
    assert set(lapack_batches(hlo)) <= {1}
    serial = set(re.findall(r"lapack_s(syevd|geqrf|orgqr)", hlo))  # what a GPU does for one matrix after the other
    assert serial <= DECOMPOSED.get(name, set())


@needs_one_cpu
def test_the_check_sees_a_batched_call():
    hlo = jax.jit(jnp.linalg.eigvalsh).lower(jnp.ones((7, 4, 4))).compile().as_text()
    assert lapack_batches(hlo) == [7]
    hlo = jax.jit(linalg.eigenvalues).lower(jnp.ones((7, 4, 4))).compile().as_text()
    assert lapack_batches(hlo) == [1]


def test_the_host_remembers_eigenvectors_only_where_it_is_told_to(monkeypatch):
    rows = np.random.default_rng(0).standard_normal((2, 6, 6))
    matrices, calls, eigh = rows + rows.swapaxes(1, 2), [], np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda x: calls.append(1) or eigh(x))
    values, vectors = host_eigh(matrices)
    np.testing.assert_allclose(vectors * values[:, None] @ vectors.swapaxes(1, 2), matrices, atol=1e-12)
    host_eigh(matrices)
    assert len(calls) == 2
    with remembering():
        found = [host_eigh(x) for x in (matrices, matrices.copy(), matrices + 1, matrices[:1])]
    assert len(calls) == 5 and found[0] is found[1] and found[2] is not found[0]
    assert all(np.array_equal(one, other) for one, other in zip(found[0], (values, vectors), strict=True))
    host_eigh(matrices)
    assert len(calls) == 6


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0])
def test_an_update_of_few_columns_spans_what_it_should(size, alike):
    """Of a basis that is stored in 16 bits."""
    rng = np.random.default_rng(3)
    u = jnp.asarray(np.linalg.qr(rng.normal(size=(2, 3, 96, 48)))[0], jnp.bfloat16)
    a, b = rng.normal(size=(2, 3, 96, 6)), size * rng.normal(size=(2, 3, 48, 6)) / 7
    b[..., 40:, :] = 0
    b = size * np.asarray(u, np.float64).mT @ a / 9 if alike else b
    found = np.asarray(jax.jit(linalg.orthonormal_update)(u, jnp.asarray(a), jnp.asarray(b)), np.float64)
    np.testing.assert_allclose(found.mT @ found, np.broadcast_to(np.eye(48), (2, 3, 48, 48)), atol=1e-5)
    left, _, right = np.linalg.svd(np.asarray(u, np.float64) + a @ b.mT, full_matrices=False)
    np.testing.assert_allclose(found, left @ right, atol=2e-3)  # U is orthonormal to as much
    np.testing.assert_allclose(found @ found.mT, left @ left.mT, atol=1e-4)
