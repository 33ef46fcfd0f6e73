"""Angles within kernels against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import channel_pairs, steps_of_pairs
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import slot_angles


@pytest.mark.parametrize("rope", [
    RopeSpec(10000.0, 48),  # 16 of 64 channels stay as they are
    RopeSpec(500000.0, 64, "llama3", 8.0, 1.0, 4.0, 8192),
    RopeSpec(10000.0, 64, "longrope", divisors=(0.3, *np.linspace(1, 60, 31))),  # a frequency above 1
], ids=["plain", "llama3", "longrope"])
def test_angles_of_slots_are_those_of_float64(rope):
    """To a radian in a million, at positions at which float32 products would be 0.1 off."""
    position = np.unique(np.concatenate([np.arange(1000), 2**21 - np.arange(1000), np.random.default_rng(0).integers(0, 2**21, 1000)]))
    steps, pairs = steps_of_pairs(rope, 64), channel_pairs(rope, 64)
    turns = position[:, None] * np.pad(pairs.frequency, (0, pairs.padded - pairs.first.size))
    found = slot_angles(position.astype(np.int32)[:, None], *(x[None] for x in steps))
    for x, wanted in zip(found, (np.cos(turns), np.sin(turns)), strict=True):
        np.testing.assert_allclose(x, wanted, atol=1e-6)


def test_angles_where_integers_have_64_bits():
    steps, position = steps_of_pairs(RopeSpec(10000.0, 64), 64), np.array([[5], [4000], [123456]])
    expected = slot_angles(position.astype(np.int32), *(x[None] for x in steps))
    with jax.enable_x64(True):
        found = slot_angles(jnp.asarray(position), *(x[None] for x in steps))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_angles_of_stale_positions_are_finite():
    stale = np.array([[-(2**31)], [-1], [2**31 - 1]], np.int32)
    found = slot_angles(stale, *(x[None] for x in steps_of_pairs(RopeSpec(10000.0, 64), 64)))
    assert all(np.all(np.abs(x) <= 1 + 1e-6) for x in found)
