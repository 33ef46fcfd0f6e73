"""What a decoded token votes on: all stored keys at once on an accelerator, block by block on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.method.votes import decoding_votes, total_attention
from lowrank_kv_jax.storage import block_reads
from lowrank_kv_jax.storage.lanes import tokens_on_lanes


@pytest.mark.parametrize("lay_out", [lambda x: x.astype(jnp.bfloat16), tokens_on_lanes], ids=["widened", "on lanes"])
def test_no_loop_on_an_accelerator(lay_out, monkeypatch):
    rng, size = np.random.default_rng(0), 2500
    q, lse = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 1, 4, 8), (2, 1, 4)))
    keys = lay_out(jnp.asarray(rng.normal(size=(2, 2, size, 8)), jnp.float32))
    positions, seen = jnp.full((2, 1), size), jnp.arange(size) < jnp.array([size, 40])[:, None, None, None, None]

    def votes():
        vote = functools.partial(decoding_votes, vote=total_attention, before=positions, seen=seen, scale=0.3)
        loops = [name for name in ("while[", "scan[") if name in str(jax.make_jaxpr(vote)(q, keys, lse))]
        return len(loops), jax.jit(vote)(q, keys, lse)

    loops, expected = votes()
    monkeypatch.setattr(block_reads, "platform", lambda: "tpu")
    none, found = votes()
    assert (loops, none) == (1, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
