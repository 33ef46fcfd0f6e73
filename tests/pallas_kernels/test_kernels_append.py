"""A token written by the Triton kernel, interpreted, and the query that comes out beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps_by_backend import steps_by_backend

from lowrank_kv_jax.pallas_kernels.append_token import gpu_triton
from lowrank_kv_jax.pallas_kernels.append_token.buffers import Buffers
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.storage.eight_bits import eight_bits_of

SLOTS = 10
LENGTHS = np.array([0, 3, 9, 10, 4], np.int32)
COUNTS = np.array([1, 1, 1, 1, 0], np.int32)


def drawn(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(len(shape) + shape[-1]).normal(size=shape), dtype)


@pytest.mark.parametrize("dim, heads, group, dtype", [
    pytest.param(24, 2, 3, "float32", marks=pytest.mark.newest), (96, 1, 1, "bfloat16"), (256, 9, 4, "float16")])
def test_a_row_gets_its_token_where_there_is_one_and_room(dim, heads, group, dtype):
    """Of five rows an empty one, one in between, one with a last slot, a full one, and one without a token."""
    rows = len(LENGTHS)
    old = [drawn(rows, heads, SLOTS, dim, dtype=dtype) + side for side in range(2)]
    new = [drawn(rows, heads, 1, dim, dtype=dtype) - side for side in range(2)]
    q = drawn(rows, 1, heads * group, dim, dtype=dtype)
    held = Buffers(*old, jnp.asarray(LENGTHS))
    (k, v, length), beside = gpu_triton.append_token(held, q, *new, jnp.asarray(COUNTS), interpret=True)
    np.testing.assert_array_equal(length, LENGTHS + COUNTS)
    np.testing.assert_array_equal(beside, q)
    for found, before, token in zip((k, v), old, new, strict=True):
        wanted = np.array(before)
        for row in range(3):
            wanted[row, :, LENGTHS[row]] = token[row, :, 0]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dim, heads", [pytest.param(24, 3, marks=pytest.mark.newest), (160, 9)])
def test_rows_in_8_bits_are_those_of_xla(dim, heads):
    """Where an entry lies halfway between two codes, too, and a token is all zeros."""
    rows, counts = len(LENGTHS), jnp.asarray(COUNTS)
    old = [eight_bits_of(drawn(rows, heads, SLOTS, dim) + side, jnp.float32) for side in range(2)]
    new = [drawn(rows, heads, 1, dim).at[:, :, :, 0].set(127.0).at[:, :, :, 1:4].set(jnp.array([0.5, 1.5, -2.5])),
           drawn(rows, heads, 1, dim).at[1].set(0.0)]
    q = drawn(rows, 1, heads, dim)
    found, beside = gpu_triton.append_token(
        Buffers(*old, jnp.asarray(LENGTHS)), q, *new, counts, interpret=True)
    np.testing.assert_array_equal(beside, q)
    for own, before, token in zip(found[:2], old, new, strict=True):
        np.testing.assert_array_equal(own.rows, before.write_tokens(token, jnp.asarray(LENGTHS), counts).rows)


def test_what_differs_in_width_or_dtype_is_left_to_xla():
    held = Buffers(drawn(1, 2, SLOTS, 16), drawn(1, 2, SLOTS, 16), jnp.zeros(1, jnp.int32))
    one, counts = drawn(1, 2, 1, 16), jnp.ones(1, jnp.int32)
    for change in ({"v": drawn(1, 2, SLOTS, 8)}, {"k": drawn(1, 2, SLOTS, 16, dtype="bfloat16")}):
        with pytest.raises(Unsupported, match="several widths or dtypes"):
            gpu_triton.append_token(held._replace(**change), drawn(1, 1, 4, 16), one, one, counts, interpret=True)
    with pytest.raises(Unsupported, match="more than a token"):
        gpu_triton.append_token(held, drawn(1, 2, 4, 16), one, one, counts, interpret=True)


@pytest.mark.parametrize("spec", ["full", pytest.param("palu:rank=0.5,recent=8", marks=pytest.mark.slow)])
def test_steps_write_what_xla_writes(spec, monkeypatch):
    """One row of two has a token."""
    states, called = steps_by_backend(spec, monkeypatch, (gpu_triton, "append_token"), jnp.array([1, 0]))
    assert called == 1
    by_xla, by_kernel = ([*jax.tree.leaves(states[backend][1]), states[backend][2][:1]] for backend in ("xla", "triton"))
    for one, other in zip(by_xla, by_kernel, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
