"""Votes by the Triton kernel, interpreted, against float64; and whole steps, whose votes are those of XLA's products."""

import jax.numpy as jnp
import numpy as np
import pytest
from steps_by_backend import steps_by_backend

from lowrank_kv_jax.pallas_kernels import gpu_owned
from lowrank_kv_jax.pallas_kernels.owned_slots import ranges_of_heads
from lowrank_kv_jax.pallas_kernels.votes import gpu_triton
from lowrank_kv_jax.pallas_kernels.votes.asked import Asked
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.state import walk

SCALE, SIZE, DIM = 0.3, 300, 24
LENGTHS = np.array([0, 1, 129, 300], np.int32)


def expected(old, q, keys, lse, seen):
    """`[B, J, S]` in float64 of queries `[B, T, N, D]`, keys `[B, N, S, D]` and who sees what, `[B, T, N, S]`."""
    logits = np.einsum("btnd,bnsd->btns", q.astype(np.float64), keys.astype(np.float64)) * SCALE - lse[..., None]
    shares = np.where(seen, np.exp(np.minimum(logits, 0)), 0).sum(1)  # [B, N, S]
    return old + shares.reshape(len(old), old.shape[1], -1, old.shape[2]).sum(2)


@pytest.mark.parametrize("queries, window", [pytest.param(1, None, marks=pytest.mark.newest), (3, None), (3, 40)])
def test_of_heads_with_slots_of_their_own(queries, window):
    """Of rows that hold nothing to all there is room for; a query that is padding votes for nothing."""
    rng, batch, heads, group = np.random.default_rng(0), len(LENGTHS), 2, 3
    q = rng.normal(size=(batch, queries, heads * group, DIM)).astype(np.float32)
    keys = rng.normal(size=(batch, heads, SIZE, DIM)).astype(np.float32)
    old = rng.random((batch, heads, SIZE)).astype(np.float32)
    lse = rng.normal(size=(batch, queries, heads * group)).astype(np.float32) + 3
    lse[2, 0] = np.inf
    at = np.maximum(LENGTHS, queries)[:, None] - queries + np.arange(queries)
    there = np.arange(SIZE) < LENGTHS[:, None]
    slots = np.arange(SIZE)[None, None]
    seen = there[:, None] & (slots <= at[..., None]) & (slots > at[..., None] - (window or SIZE + 1))
    none = jnp.zeros((batch, 2), jnp.int32)
    held = jnp.asarray(np.where(there[:, None, :, None], keys, np.nan))
    tokens = CachedTokens(held, held, jnp.asarray(LENGTHS), Runs(none, none))
    asked = Beside(jnp.asarray(q), tokens, jnp.asarray(at), True, window)
    (found,) = gpu_triton.add_votes([Asked(jnp.asarray(old), asked)], jnp.asarray(lse), scale=SCALE, interpret=True)
    repeated = np.repeat(np.where(there[:, None, :, None], keys, 0), group, axis=1)
    np.testing.assert_allclose(found, expected(old, q, repeated, lse, seen[:, :, None]), atol=2e-5)


def test_of_heads_behind_each_other_in_one_buffer():
    """Each head adds to the slots that it owns, some of which lie among another's."""
    rng, batch, heads, group = np.random.default_rng(1), 2, 3, 2
    counts = np.array([290, 150], np.int32)
    owner = np.sort(rng.integers(0, heads, (batch, 1, SIZE)), axis=2).astype(np.int8)
    owner[:, 0, [3, 140]] = owner[:, 0, [140, 3]]
    q = rng.normal(size=(batch, 1, heads * group, DIM)).astype(np.float32)
    keys, old = rng.normal(size=(batch, 1, SIZE, DIM)).astype(np.float32), rng.random((batch, 1, SIZE)).astype(np.float32)
    lse = rng.normal(size=(batch, 1, heads * group)).astype(np.float32) + 3
    there = np.arange(SIZE) < counts[:, None]
    where = PerHead(jnp.zeros((batch, 1, SIZE), jnp.int32), jnp.asarray(owner), heads)
    held = jnp.asarray(np.where(there[:, None, :, None], keys, np.nan))
    asked = Beside(jnp.asarray(q), CachedTokens(held, held, jnp.asarray(counts), where), jnp.asarray(counts[:, None]), False)
    (found,) = gpu_triton.add_votes([Asked(jnp.asarray(old), asked)], jnp.asarray(lse), scale=SCALE, interpret=True)
    mine = there[:, None, None] & (owner[:, :, None] == np.repeat(np.arange(heads), group)[None, None, :, None])
    repeated = np.repeat(np.where(there[:, None, :, None], keys, 0), heads * group, axis=1)
    np.testing.assert_allclose(found, expected(old, q, repeated, lse, mine), atol=2e-5)


@pytest.mark.parametrize("spec, few", [
    ("momentkv:keep=0.5,sinks=2,recent=8", None), ("scissorhands:keep=0.5,recent=8", 0),
    pytest.param("h2o:keep=0.5,recent=8", None, marks=pytest.mark.slow)])
def test_steps_vote_as_by_xla(spec, few, monkeypatch):
    """Exact tokens beside stored ones, or by a launch of their own, because there are more than a few."""
    monkeypatch.setattr(gpu_triton, "FEW_SLOTS", gpu_triton.FEW_SLOTS if few is None else few)
    states, called = steps_by_backend(spec, monkeypatch, (gpu_triton, "add_votes"))
    assert called == 1  # for exact and for stored tokens at once; XLA would not say that it does it instead
    (first, by_xla), (_, by_kernel) = (
        [{path: np.asarray(x) for path, x, _ in walk(state) if "votes" in path} for state in states[backend][:2]]
        for backend in ("xla", "triton"))
    assert by_xla.keys() == {"0.near_votes", "0.far_votes"}
    for path, votes in by_xla.items():
        assert (votes > first[path]).any()
        np.testing.assert_allclose(by_kernel[path], votes, atol=2e-5)


@pytest.mark.parametrize("size", [pytest.param(300, marks=pytest.mark.newest), 40_000])
def test_ranges_of_heads_are_those_of_xla(size):
    """Of a row whose heads lie among each other, one of which a head has no token, and one without tokens."""
    heads, rng = 3, np.random.default_rng(size)
    owner = np.sort(rng.integers(0, heads, (3, 1, size)), axis=2).astype(np.int8)
    owner[0, 0, [3, size - 20]] = owner[0, 0, [size - 20, 3]]
    owner[1] = np.where(owner[1] == 1, 0, owner[1])
    lengths = jnp.array([size - 7, size, 0])
    found = gpu_owned.ranges_of_heads(jnp.asarray(owner), lengths, heads, interpret=True)
    for one, other in zip(found, ranges_of_heads(jnp.asarray(owner), lengths, heads), strict=True):
        np.testing.assert_array_equal(one, other)
