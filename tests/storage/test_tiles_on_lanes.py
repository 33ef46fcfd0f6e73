"""Codes with scales for tiles on lanes: the same tokens, and there and back the same storage."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import store

from lowrank_kv_jax.storage.lanes import LANES, lay_out, tokens_on_lanes
from lowrank_kv_jax.storage.packed import empty_packed, hold_packed
from lowrank_kv_jax.storage.quantised import QuantisedTokens, Tile, empty_tokens
from lowrank_kv_jax.storage.tiles_on_lanes import GroupedOnLanes, PackedOnLanes, TiledOnLanes


def check(stored, kind):
    held = jax.jit(tokens_on_lanes)(stored)
    assert type(held) is kind and held.shape == stored.shape
    size = stored.shape[2]
    np.testing.assert_array_equal(held.read_block(0, size), stored.read_block(0, size))
    np.testing.assert_array_equal(held.read_block(size - 37, 37), stored.read_block(size - 37, 37))
    assert held.codes.on_lanes.shape[2] % 8 == 0 and held.codes.on_lanes.shape[3] % LANES == 0
    chex.assert_trees_all_equal(lay_out(held, "rows"), stored)


@pytest.mark.parametrize(
    "bits, tile, width, kind",
    [
        (2, Tile(32, 1), 40, TiledOnLanes),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            (4, Tile(1, 16), 40, GroupedOnLanes), (4, Tile(128, 1), 64, TiledOnLanes), (8, Tile(24, 1), 20, TiledOnLanes), (2, Tile(1, 32), 128, GroupedOnLanes),
            (8, Tile(1, None), 64, GroupedOnLanes),
        )),
    ],
)
def test_tiles(bits, tile, width, kind):
    x = np.random.default_rng(0).normal(size=(2, 3, 300, width)).astype(np.float32)
    check(store(jnp.asarray(x), bits, None, tile), kind)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 8])
def test_heads_behind_each_other(bits):
    x = np.random.default_rng(0).normal(size=(2, 1, 300, 40)).astype(np.float32)
    owner = np.zeros((2, 1, 300), np.int8)
    owner[0, 0, 5:135], owner[1, 0, 290:] = 2, 1
    stored = hold_packed(empty_packed(2, 3, 300, 40, bits, 32), jnp.asarray(x), jnp.asarray(owner), jnp.array([135, 300]))
    check(stored, PackedOnLanes)


def test_tiles_of_several_tokens_and_channels_stay_in_rows():
    stored = empty_tokens((1, 1, 64, 32), 4, None, Tile(32, 4))
    assert isinstance(tokens_on_lanes(stored), QuantisedTokens)
