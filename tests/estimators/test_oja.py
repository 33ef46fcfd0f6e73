"""Oja's rule and its anchored steps against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.estimators import oja
from lowrank_kv_jax.estimators.oja import ANCHOR, LEAST, NORMALIZATIONS

RNG = np.random.default_rng(0)
ONES = jnp.ones((1, 64))
# operation by operation, every one of them would be compiled
anchored_update = jax.jit(oja.anchored_update, static_argnums=(4, 5))
oja_update = jax.jit(oja.oja_update, static_argnums=(3, 4))


def basis(rank, *lead, width=12):
    return jnp.asarray(np.linalg.qr(RNG.normal(size=(*lead, width, rank)))[0], jnp.float32)


def tokens(count=64, heads=2, width=12):
    return jnp.asarray(RNG.normal(size=(1, count, heads, width)) * np.linspace(2, 0.1, width), jnp.float32)


def projector(u):
    return np.einsum("...wr,...vr->...wv", *(np.asarray(u, np.float64),) * 2)


def test_a_step_is_one_of_orthogonal_iteration_for_what_is_stored_and_new_tokens():
    u, x = basis(4, 1, 2), tokens()
    root = RNG.normal(size=(1, 2, 4, 4)) * 9
    held = root @ root.swapaxes(-1, -2)
    moved = anchored_update(u, jnp.asarray(held), x, ONES, 0.7)
    for head in range(2):
        own, rows = np.asarray(u[0, head], np.float64), np.asarray(x[0, :, head], np.float64)
        anchor = ANCHOR * np.sum((rows @ own) ** 2) / 64 / 4 + LEAST * np.trace(held[0, head])
        moment = own @ (held[0, head] + anchor * np.eye(4)) @ own.T + 0.7 * rows.T @ rows
        expected = np.linalg.qr(moment @ own)[0]
        np.testing.assert_allclose(projector(moved[0, head]), projector(expected), atol=1e-4)


def test_a_step_towards_few_tokens_is_the_same():
    """It is orthonormalised in what they span, by smaller factors."""
    u, x, weight = basis(8, 1, 2), tokens(2), jnp.asarray([[1.0, 0.5]])
    root = RNG.normal(size=(1, 2, 8, 8)) * 3
    held = jnp.asarray(root @ root.swapaxes(-1, -2))
    few, all_of_it = (anchored_update(u, held, x, weight, 0.7, ordered) for ordered in (False, True))
    assert np.abs(np.asarray(few - all_of_it)).max() > 1e-2
    np.testing.assert_allclose(projector(few), projector(all_of_it), atol=1e-4)


def test_steps_end_at_the_principal_subspace_and_leave_columns_where_they_were():
    """The same text over and over, transported and stored each time; columns are not reordered on the way."""
    u, x = basis(4, 1, 1), tokens(heads=1)
    rows, first = np.asarray(x[0, :, 0], np.float64), u
    stored = rows @ np.asarray(u[0, 0], np.float64)
    for at in range(200):
        moved = anchored_update(u, jnp.asarray((stored.T @ stored)[None, None]), x, ONES, 1.0)
        turn = np.asarray(u[0, 0], np.float64).T @ np.asarray(moved[0, 0], np.float64)
        if not at:
            assert (np.diag(turn) > 0.5).all() and np.abs(np.triu(turn, 1)).max() < 0.5
        stored, u = np.concatenate([stored @ turn, rows @ np.asarray(moved[0, 0], np.float64)]), moved
    best = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :4]
    near = np.trace(projector(u[0, 0]) @ (rows.T @ rows)) / np.trace(best.T @ rows.T @ rows @ best)
    assert near > 0.98 > np.trace(projector(first[0, 0]) @ (rows.T @ rows)) / np.trace(best.T @ rows.T @ rows @ best)


def test_little_energy_and_none_leave_a_basis_that_is_orthonormal():
    u = basis(4, 1, 1)
    held = np.zeros((1, 1, 4, 4))
    held[0, 0, 0, 0] = 1e12
    for x, stored in ((0 * tokens(heads=1), held), (1e-6 * tokens(heads=1), held), (0 * tokens(heads=1), 0 * held)):
        moved = np.asarray(anchored_update(u, jnp.asarray(stored), x, ONES, 1.0))[0, 0]
        np.testing.assert_allclose(moved.T @ moved, np.eye(4), atol=1e-5)


def test_steps_shrink_with_what_is_stored_and_grow_with_eta():
    u, x = basis(4, 1, 2), tokens(heads=2)

    def turn(scale, eta=1.0):
        moved = anchored_update(u, scale * jnp.eye(4) * jnp.ones((1, 2, 1, 1)), x, ONES, eta)
        return 1 - np.einsum("...ab,...ba->...", projector(moved), projector(u)).mean() / 4

    turns = [turn(scale) for scale in (0.0, 1e2, 1e4, 1e8)]
    assert turns == sorted(turns, reverse=True) and turns[0] > 0.05 and abs(turns[-1]) < 1e-6
    assert turn(1e4, eta=10.0) > turn(1e4)


def test_rows_without_tokens_keep_their_basis():
    u = basis(4, 1, 2)
    still = anchored_update(u, jnp.zeros((1, 2, 4, 4)), tokens(), 0 * ONES, 1.0)
    np.testing.assert_array_equal(still, u)


@pytest.mark.parametrize("normalize, heads", [  # each rule with one of both
    pytest.param(rule, heads, marks=[] if heads == 1 + i % 2 else pytest.mark.slow)
    for i, rule in enumerate(NORMALIZATIONS) for heads in (1, 2)])
def test_queries_are_tokens_in_the_channels_of_their_head(heads, normalize):
    """Two kv heads of six channels, each with three queries, in a basis of each head or in one of both."""
    u, x, q = basis(4, 1, heads, width=12 // heads), tokens(heads=heads, width=12 // heads), tokens(heads=6, width=6)
    weight = jnp.asarray(RNG.integers(0, 2, (1, 64)), jnp.float32)
    moved = oja_update(u, x, weight, 0.1, normalize, q)
    rows = np.zeros((1, 64, 6, heads, 12 // heads), np.float32)
    for n in range(6):
        if heads == 1:
            rows[:, :, n, 0, 6 * (n // 3) : 6 * (n // 3 + 1)] = q[:, :, n]
        else:
            rows[:, :, n, n // 3] = q[:, :, n]
    together = jnp.concatenate([x, rows.reshape(1, -1, heads, 12 // heads)], axis=1)
    weights = jnp.concatenate([weight, jnp.repeat(weight, 6, axis=1)], axis=1)
    if normalize != "token" or heads == 1:  # a row of zeros has no direction, and is left out all the same
        np.testing.assert_allclose(moved, oja_update(u, together, weights, 0.1, normalize), atol=2e-4)


def test_an_update_may_be_vectorised():
    u, x = basis(4, 2, 2), jnp.concatenate([tokens(), tokens()])
    held = jnp.ones((2, 2, 1, 1)) * jnp.eye(4)
    both = anchored_update(u, held, x, jnp.ones((2, 64)), 1.0)
    one = anchored_update(u[1:], held[1:], x[1:], ONES, 1.0)
    np.testing.assert_allclose(both[1:], one, atol=1e-5)
