"""Which blocks of a buffer are read: those that hold a token which some query sees."""

import jax.numpy as jnp
import pytest

from lowrank_kv_jax.storage.block_reads import visible_blocks
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import PerHead, Runs

SIZE, BLOCK = 4096, 512


def blocks(lengths, positions, window, where=None):
    buffer, none = jnp.zeros((len(lengths), 1, SIZE, 1)), jnp.zeros((len(lengths), 1), jnp.int32)
    tokens = CachedTokens(buffer, buffer, jnp.array(lengths), where or Runs(none, none))
    return tuple(map(int, visible_blocks(tokens, jnp.array(positions), window, BLOCK)))


@pytest.mark.parametrize(("lengths", "positions", "window", "expected"), [
    ([4000], [[4000]], None, (0, 8)),
    ([4000], [[4000]], 512, (6, 8)),  # slots 3489 on
    ([4000], [[3000, 4000]], 512, (4, 8)),  # the earlier query's, 2489 on
    ([4000, 100], [[4000], [100]], 512, (0, 8)),  # the shorter row's
    ([4000, 0], [[4000], [0]], 512, (6, 8)),  # a row without tokens asks for none
    ([100], [[4000]], 512, (6, 1)),  # none: all have left the window
])
def test_blocks_begin_where_windows_do(lengths, positions, window, expected):
    assert blocks(lengths, positions, window) == expected


def test_slots_in_no_order_are_all_read():
    where = PerHead(jnp.zeros((1, 1, SIZE), jnp.int32), None, 1)
    assert blocks([4000], [[4000]], 512, where) == (0, 8)
