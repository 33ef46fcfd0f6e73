"""Chunks with bases of their own, on every backend, against float64 over rebuilt tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention
from kernel_cases import check, lanes, rotated

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.chunked_attention import chunked_attention, pages
from lowrank_kv_jax.pallas_kernels.chunked_attention.by_kernel import chunk_slots
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.chunk_bases import store_bases
from lowrank_kv_jax.storage.positions import Runs

B, C, K, N, D, PAGE, S = 2, 4, 2, 4, 32, 50, 700
RANKS = (16, 24)
SCALE = 0.3


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    lengths = np.array([690, 301], np.int32)
    # across blocks and tiles; a basis that no page has; one that no page has yet; stale owners beyond the length
    owner = np.array([[0] * 3 + [1] * 9 + [3] * 2, [0] * 6 + [1] + [0] * 7], np.int32)
    k, v = (rng.normal(size=(B, K, S, r)) for r in RANKS)
    k_bases, v_bases = (rng.normal(size=(B, C, K, D, r)) / np.sqrt(r) for r in RANKS)
    q = rng.normal(size=(B, 1, N, D))
    of = np.repeat(owner, PAGE, axis=1)[:, :, None, None, None]
    wide = [np.einsum("bjsr,bsjwr->bsjw", x, np.take_along_axis(u, of, axis=1)) for x, u in ((k, k_bases), (v, v_bases))]
    mask = (np.arange(S) < lengths[:, None])[:, None]
    oracle = softmax_attention(q, *wide, mask, SCALE)
    stale = (np.arange(S) >= lengths[:, None])[:, None, :, None]
    runs = Runs(jnp.zeros((B, 2), jnp.int32), jnp.zeros((B, 2), jnp.int32))
    k, v = (jnp.asarray(np.where(stale, np.nan, x), jnp.float32) for x in (k, v))
    q, *bases = (jnp.asarray(x, jnp.float32) for x in (q, k_bases, v_bases))
    tokens = CachedTokens(k, v, jnp.asarray(lengths), runs)
    return q, tokens, jnp.asarray(owner), [store_bases(u, "float32", by_rows) for u, by_rows in zip(bases, (False, True), strict=True)], oracle


NEWEST = [pytest.param(backend, None, marks=pytest.mark.newest) for backend in ("triton", "tpu")]


@pytest.mark.slow
@pytest.mark.parametrize("backend, dtype, jump", [("xla", "float32", 9), ("tpu", "float32", 100000), ("tpu", "bfloat16", 9)])
def test_chunks_before_rope(backend, dtype, jump):
    """Ten pages of two grid steps, and two gaps in their positions, one of them within a page."""
    rng, page, rope = np.random.default_rng(0), 128, RopeSpec(10000.0, D)
    size, lengths = 10 * page, np.array([10 * page - 5, 301, 0], np.int32)
    owner = np.array([[0] * 2 + [1] * 5 + [3] * 3, [0] * 3 + [1] * 7, [0] * 10], np.int32)
    k, v = (rng.normal(size=(3, K, size, r)) for r in RANKS)
    bases = [rng.normal(size=(3, C, K, D, r)) / np.sqrt(r) for r in RANKS]
    q = rng.normal(size=(3, 1, N, D))
    q, k, v, *bases = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k, v, *bases))
    of = np.repeat(owner, page, axis=1)[:, :, None, None, None]
    keys, values = (np.einsum("bjsr,bsjwr->bsjw", x, np.take_along_axis(u, of, axis=1)) for x, u in zip((k, v), bases, strict=True))
    runs = Runs(jnp.asarray([[0, 300]] * 3), jnp.asarray([[4, jump]] * 3))
    keys = rotated(keys, np.asarray(runs.at(jnp.arange(size))), rope)
    there = np.arange(size) < lengths[:, None]
    oracle = softmax_attention(q, keys, values, there[:, None], SCALE)
    k, v = (jnp.asarray(np.where(there[:, None, :, None], x, 0.0 if backend == "xla" else np.nan), dtype) for x in (k, v))
    tokens = CachedTokens(k, v, jnp.asarray(lengths), runs)
    tokens = lanes(tokens) if backend == "tpu" else tokens
    attend = functools.partial(
        chunked_attention, page=page, rope=rope, kv_heads=K, scale=SCALE, window=None, backend=backend
    )
    stored = [store_bases(jnp.asarray(u), dtype, by_rows) for u, by_rows in zip(bases, (False, True), strict=True)]
    part = jax.jit(attend)(jnp.asarray(q, dtype), tokens, jnp.asarray(owner), *stored, q_positions=tokens.lengths[:, None])
    check(part, oracle, dtype)


def test_chunks_lie_where_their_pages_are():
    _, tokens, owner, _, _ = inputs()
    first, after = chunk_slots(owner, tokens.lengths, PAGE, C)
    np.testing.assert_array_equal(first, [[0, 150, 600, 600], [0, 300, 350, 350]])
    np.testing.assert_array_equal(after, [[150, 600, 600, 700], [300, 350, 350, 350]])


@pytest.mark.parametrize("backend, block", [("xla", 2048), ("xla", 300), ("xla", 20), *NEWEST])
def test_chunks(backend, block, monkeypatch):
    """Whatever the pages that are read at a time: all, six (the last of three blocks begins earlier), one."""
    monkeypatch.setattr(pages, "BLOCK", block)
    q, tokens, owner, bases, oracle = inputs()
    if backend == "xla":  # which multiplies what it masks by zero
        tokens = tokens._replace(keys=jnp.nan_to_num(tokens.keys), values=jnp.nan_to_num(tokens.values))
    tokens = lanes(tokens) if backend == "tpu" else tokens
    attend = functools.partial(
        chunked_attention, page=PAGE, rope=None, kv_heads=K, scale=SCALE, window=None, backend=backend
    )
    part = jax.jit(attend)(q, tokens, owner, *bases, q_positions=tokens.lengths[:, None])
    check(part, oracle)
