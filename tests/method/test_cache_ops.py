"""Caches are values: forked for several questions, rows taken and inserted."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, methods, model, prompts, small_configuration

from lowrank_kv_jax.generation.forward import extend, prefill
from lowrank_kv_jax.generation.generate import ingest
from lowrank_kv_jax.method.cache import fork, insert_rows, take_rows
from lowrank_kv_jax.methods import REGISTRY

every_method = pytest.mark.parametrize("name", list(methods({"kivi"})))  # whose tiles no operation of rows sees
FULL = REGISTRY["full"]()
LENGTHS = (64, 40)
QUESTIONS = [[1, 2, 3], [4] * 21, [5], list(range(17))]


def fill(method, rows=slice(None), **options):
    tokens, lengths = prompts(length=64)[rows], jnp.asarray(LENGTHS, jnp.int32)[rows]
    return prefill(
        method,
        PLAIN,
        model().params,
        tokens,
        lengths,
        bases=bases_for(method),
        **{"capacity": 100, "block": 8, "dtype": jnp.float32} | options,
    )[0]


@functools.cache
def filled(name):
    return fill(small_configuration(REGISTRY[name]))


def assert_same(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@jax.jit
def moved(cache):
    """One program for all leaves and moves: each would be one of its own."""
    first, second = take_rows(cache, [0]), take_rows(cache, [1])
    return first, second, [
        insert_rows(first, second),
        take_rows(fork(cache, 3), [2, 3]),  # rows lie beside their copies
        take_rows(insert_rows(cache, cache), [2, 1]),
        fork(cache),
    ]


@every_method
def test_rows_are_taken_repeated_and_inserted(name):
    cache = filled(name)
    first, second, same = moved(cache)
    assert first.layout.batch == 1 and second.length.tolist() == [40]
    for again in same:
        assert_same(again, cache)


@every_method
def test_a_fork_outlives_its_donated_origin(name):
    cache = fill(small_configuration(REGISTRY[name]))
    copy, one = fork(cache), take_rows(cache, [0, 1])
    jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert_same(copy, filled(name))
    assert_same(one, filled(name))


def answers(method, cache, questions):
    return ingest(method, PLAIN, model().params, cache, questions, bases=bases_for(method))[1]


def test_questions_on_one_context_equal_fresh_prefills():
    logits = answers(FULL, fork(filled("full"), 2), QUESTIONS)
    texts = [[*prompts(length=64)[i // 2, : LENGTHS[i // 2]].tolist(), *q] for i, q in enumerate(QUESTIONS)]
    padded = jnp.asarray([t + [0] * (96 - len(t)) for t in texts], jnp.int32)
    lengths = jnp.asarray([len(t) for t in texts], jnp.int32)
    _, fresh = prefill(FULL, PLAIN, model().params, padded, lengths, dtype=jnp.float32)
    np.testing.assert_allclose(logits, fresh, atol=1e-4)


@pytest.mark.parametrize("name", ["ojakv", pytest.param("single-svd", marks=pytest.mark.slow)])
def test_questions_do_not_see_each_other(name):
    method = small_configuration(REGISTRY[name])
    logits = answers(method, fork(filled(name), 2), QUESTIONS)
    for i, question in enumerate(QUESTIONS):
        alone = answers(method, take_rows(filled(name), [i // 2]), [question])
        np.testing.assert_allclose(logits[i], alone[0], atol=2e-4)


def test_inserted_rows_continue_as_before():
    """A row joins a batch that is further on; both go on as they would alone."""
    step = functools.partial(extend, FULL, PLAIN, model().params)
    running, _ = step(fill(FULL, slice(0, 1)), jnp.array([[7, 8]]))
    joined = insert_rows(running, fill(FULL, slice(1, 2)))
    assert joined.length.tolist() == [66, 40] and int(joined.pending) == 2
    _, logits = step(joined, jnp.array([[9], [9]]))
    _, first = step(running, jnp.array([[9]]))
    _, second = step(fill(FULL, slice(1, 2)), jnp.array([[9]]))
    np.testing.assert_allclose(logits, jnp.concatenate([first, second]), atol=1e-5)


def test_what_does_not_fit_is_refused():
    cache = filled("full")
    with pytest.raises(ValueError, match="this cache was made by"):
        insert_rows(cache, filled("ojakv"))
    for options in ({"capacity": 90}, {"block": 4}, {"dtype": jnp.bfloat16}):
        with pytest.raises(ValueError, match="layouts differ"):
            insert_rows(cache, fill(FULL, **options))
    for rows in ([], [2], [-1]):
        with pytest.raises(ValueError, match="rows="):
            take_rows(cache, rows)
    with pytest.raises(ValueError, match="copies=0"):
        fork(cache, 0)


def test_prefill_leaves_the_lengths_to_their_owner():
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    cache, _ = prefill(FULL, PLAIN, model().params, prompts(length=64), lengths, dtype=jnp.float32)
    jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(cache)
    assert lengths.tolist() == list(LENGTHS)
