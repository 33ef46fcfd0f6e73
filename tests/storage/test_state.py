"""Token buffers against plain lists, and the declarations of a cache's leaves."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_kv_jax.storage.state import leaf, map_leaves, state, static, take_tokens, walk, write_tokens

SIZE = 7
write = jax.jit(write_tokens)
take = jax.jit(take_tokens, static_argnames="size")

rows = st.lists(st.tuples(st.integers(0, SIZE + 2), st.integers(0, 5)), min_size=3, max_size=3)


@given(rows, st.integers(1, 5), st.integers(0, 99))
def test_write_tokens_is_assignment_to_a_slice(where, tokens, seed):
    rng = np.random.default_rng(seed)
    buffer, new = rng.normal(size=(3, 2, SIZE, 2)), rng.normal(size=(3, 2, tokens, 2))
    buffer, new = buffer.astype(np.float32), new.astype(np.float32)
    start, counts = (np.array(x, np.int32) for x in zip(*where, strict=True))
    counts = np.minimum(counts, tokens)
    expected = buffer.copy()
    for b in range(3):
        for t in range(counts[b]):
            if start[b] + t < SIZE:  # what would fall outside is dropped
                expected[b, :, start[b] + t] = new[b, :, t]
    np.testing.assert_array_equal(write(buffer, new, start, counts), expected)


def test_a_token_is_written_alike_on_a_gpu(monkeypatch):
    rng = np.random.default_rng(0)
    buffer, new = (jnp.asarray(rng.normal(size=(5, 2, n, 3)), jnp.float32) for n in (SIZE, 1))
    start, counts = jnp.array([0, 6, 7, -1, 3]), jnp.array([1, 1, 1, 1, 0])
    expected = write_tokens(buffer, new, start, counts)
    monkeypatch.setattr(f"{write_tokens.__module__}.on_gpu", lambda: True)
    found = jax.make_jaxpr(write_tokens)(buffer, new, start, counts)
    assert "dynamic_slice" not in str(found) and "gather" not in str(found)
    np.testing.assert_array_equal(write_tokens(buffer, new, start, counts), expected)
    assert not np.array_equal(expected[:2], buffer[:2]) and np.array_equal(expected[2:], buffer[2:])


@given(st.lists(st.integers(0, SIZE + 2), min_size=3, max_size=3), st.integers(1, SIZE))
def test_take_tokens_repeats_the_last_beyond_the_end(start, size):
    buffer = np.broadcast_to(np.arange(SIZE, dtype=np.float32)[None, None, :, None], (3, 2, SIZE, 1))
    taken = take(buffer, np.array(start, np.int32), size=size)
    expected = [[min(s + i, SIZE - 1) for i in range(size)] for s in start]
    np.testing.assert_array_equal(taken[:, 1, :, 0], expected)


def test_writing_more_than_fits_is_refused():
    none = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="3 tokens written at once into a buffer of 2"):
        write_tokens(jnp.zeros((1, 1, 2, 1)), jnp.zeros((1, 1, 3, 1)), none, none)


def test_new_tokens_take_the_dtype_of_the_buffer():
    one = jnp.ones((1,), jnp.int32)
    out = write_tokens(jnp.zeros((1, 1, 2, 1), jnp.bfloat16), jnp.full((1, 1, 1, 1), 1 / 3), one, one)
    assert out.dtype == jnp.bfloat16 and out[0, 0, 1, 0] == jnp.bfloat16(1 / 3)


@state
class Part:
    a: jax.Array = leaf("batch", "tokens", kind="exact")
    b: jax.Array | None = leaf(None, kind="scales")


@state
class Whole:
    parts: tuple
    n: jax.Array = leaf(kind="indices")
    name: str = static()


def whole():
    return Whole((Part(jnp.ones((2, 3)), None), Part(jnp.zeros((2, 1)), jnp.ones(4))), jnp.int32(3), "x")


def test_walk_names_every_leaf_once():
    found = {path: (array.shape, info.axes, info.kind) for path, array, info in walk(whole())}
    assert found == {
        "parts.0.a": ((2, 3), ("batch", "tokens"), "exact"),
        "parts.1.a": ((2, 1), ("batch", "tokens"), "exact"),
        "parts.1.b": ((4,), (None,), "scales"),
        "n": ((), (), "indices"),
    }
    assert len(found) == len(jax.tree.leaves(whole()))


def test_map_leaves_keeps_structure_and_hands_over_declarations():
    twice = map_leaves(lambda info, x, y: x + y if info.kind == "exact" else x, whole(), whole())
    chex.assert_trees_all_equal_structs(twice, whole())
    np.testing.assert_array_equal(twice.parts[0].a, 2 * np.ones((2, 3)))
    assert twice.n == 3 and twice.name == "x" and twice.parts[0].b is None


def test_states_are_frozen_and_static_fields_belong_to_the_structure():
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole().n = 3
    assert jax.tree.structure(whole()) != jax.tree.structure(dataclasses.replace(whole(), name="y"))


def test_undeclared_arrays_and_unknown_declarations_are_refused():
    with pytest.raises(TypeError, match="not declared"):
        list(walk((jnp.ones(2),)))
    with pytest.raises(ValueError, match="axes must be of"):
        leaf("heads", kind="exact")
    with pytest.raises(ValueError, match="kind of"):
        leaf("batch", kind="cache")
