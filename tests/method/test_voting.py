"""Votes of many queries are taken block by block."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.method import Place
from lowrank_kv_jax.method.votes import QUERIES, total_attention
from lowrank_kv_jax.method.voting import Voters

LAYOUT = types.SimpleNamespace(spec=types.SimpleNamespace(logits={"scale": 0.5}))
METHOD = types.SimpleNamespace(selection=types.SimpleNamespace(vote=total_attention))


@pytest.mark.parametrize("count", [QUERIES - 1, 2 * QUERIES - 28])
def test_blocks_of_voters_add_up(count):
    """Against float64; rows of several lengths, a sliding window, two buffers that share their tokens' positions."""
    rng, size, window = np.random.default_rng(count), 150, 40
    q, keys = rng.normal(size=(2, count, 4, 8)), rng.normal(size=(2, 2, size, 8))
    at, position = np.arange(count) + np.array([[30], [60]]), np.arange(size)
    voters = Voters(*(jnp.asarray(x, jnp.float32) for x in (q, np.zeros((2, count, 4)))), jnp.asarray(at),
                    jnp.asarray(np.arange(count) < np.array([[count], [17]])))
    held = jnp.asarray(position < np.array([[size], [50]]))[:, None]

    def votes(part, keys, held):
        return part.votes(METHOD, LAYOUT, Place(0, window), keys, jnp.broadcast_to(position, (2, 1, size)), held)

    taken = jax.jit(lambda voters, *known: voters.in_blocks(lambda part: votes(part, *known)))
    found = taken(voters, jnp.asarray(keys, jnp.float32), held)
    p = np.exp(np.minimum(np.einsum("btjgd,bjsd->bjtgs", q.reshape(2, count, 2, 2, 8), keys) * 0.5, 0.0))
    seen = (position <= at[:, :, None]) & (position > at[:, :, None] - window) & np.asarray(held)
    seen = seen & np.asarray(voters.there)[:, :, None]
    np.testing.assert_allclose(found, np.where(seen[:, None, :, None], p, 0.0).sum((2, 3)), rtol=1e-4, atol=1e-4)
