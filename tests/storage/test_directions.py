"""Directions of a basis in 8 and 4 bits, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.storage.directions import in_few_bits


def held(basis, parts, precise, count):
    """The first `count` columns as they are read, and as they are packed."""
    packed = in_few_bits(basis, parts, precise)
    codes, units = (np.asarray(x, np.float64) for x in jax.tree.map(jnp.asarray, packed).first(count))
    return codes * np.repeat(units, basis.shape[1] // parts, axis=1), packed


@given(st.integers(0, 2**16), st.integers(0, 7), st.integers(1, 7), st.sampled_from([1, 3]))
@settings(max_examples=25, deadline=None)
def test_directions_are_read_within_their_units(seed, precise, count, parts):
    rng = np.random.default_rng(seed)
    basis = rng.normal(size=(2, 96, 7)) * np.exp(rng.normal(size=(2, 1, 7)))
    read, packed = held(basis, parts, precise, count)
    assert read.shape == (2, 96, count) and packed.fine.dtype == np.int8 and packed.fine.shape[-1] == precise
    if precise == 7:
        assert packed.coarse is None
    else:
        assert packed.coarse.dtype == np.int8 and packed.coarse.shape[-1] == -(-(7 - precise) // 2)
    errors = np.square(read - basis[..., :count]).sum(1) / np.square(basis[..., :count]).sum(1)
    assert (errors[:, :precise] < 2e-4).all() and (errors < 0.02).all()
    split = (x.reshape(2, parts, -1, x.shape[-1])[..., :precise] for x in (read, basis))
    got, wanted = split
    assert np.abs(got - wanted[..., :count]).max(initial=0) <= np.abs(wanted).max(2).max(initial=0) / 254 * (1 + 1e-6)


def test_four_bits_err_as_little_as_a_uniform_quantiser_may():
    """Of Gaussian numbers it errs by 0.0115 of their variance (Max, 1960)."""
    basis = np.random.default_rng(0).normal(size=(1, 20000, 4))
    read, packed = held(basis, 1, 0, 4)
    np.testing.assert_allclose(np.square(read - basis).mean(1), 0.0115, rtol=0.05)
    assert packed.coarse.nbytes == basis.size / 2


@pytest.mark.parametrize("precise", [0, 2])
def test_columns_of_zeros_stay_zeros(precise):
    basis = np.zeros((1, 6, 5))
    basis[..., 1] = basis[..., 3] = np.arange(6) - 2.5
    read, _ = held(basis, 2, precise, 5)
    assert not read[..., [0, 2, 4]].any() and np.abs(read - basis).max() < 0.2
