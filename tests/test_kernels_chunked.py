"""Chunks with bases of their own, on every backend, against float64 over rebuilt tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention
from kernel_cases import check, lanes

from lowrank_kv_jax.pallas_kernels.coefficient_attention import CachedTokens, chunked_coefficient_attention
from lowrank_kv_jax.positions import Runs

B, C, K, N, D, S = 2, 3, 2, 4, 32, 700
RANKS = (16, 24)
SCALE = 0.3


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    lengths = np.array([690, 301], np.int32)
    first = np.array([[0, 130, 600], [0, 300, S]], np.int32)  # across blocks and tiles; a chunk of one token; none
    k, v = (rng.normal(size=(B, K, S, r)) for r in RANKS)
    k_bases, v_bases = (rng.normal(size=(B, C, K, D, r)) / np.sqrt(r) for r in RANKS)
    q = rng.normal(size=(B, 1, N, D))
    of = (np.arange(S)[None, :, None] >= first[:, None]).sum(-1) - 1
    wide = [np.einsum("bjsr,bsjwr->bsjw", x, np.take_along_axis(u, of[:, :, None, None, None], axis=1))
            for x, u in ((k, k_bases), (v, v_bases))]
    mask = (np.arange(S) < lengths[:, None])[:, None]
    oracle = softmax_attention(q, *wide, mask, SCALE)
    stale = (np.arange(S) >= lengths[:, None])[:, None, :, None]
    runs = Runs(jnp.zeros((B, 2), jnp.int32), jnp.zeros((B, 2), jnp.int32))
    k, v = (jnp.asarray(np.where(stale, np.nan, x), jnp.float32) for x in (k, v))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k_bases, v_bases)]
    return arrays, CachedTokens(k, v, jnp.asarray(lengths), runs), jnp.asarray(first), jnp.asarray(lengths), oracle


@pytest.mark.parametrize("backend, most", [("xla", None), ("triton", 470), ("tpu", 470)])
def test_chunks(backend, most):
    (q, k_bases, v_bases), tokens, first, lengths, oracle = inputs()
    if backend == "xla":  # which multiplies what it masks by zero
        tokens = tokens._replace(keys=jnp.nan_to_num(tokens.keys), values=jnp.nan_to_num(tokens.values))
    tokens = lanes(tokens) if backend == "tpu" else tokens
    attend = functools.partial(
        chunked_coefficient_attention, kv_heads=K, scale=SCALE, causal=False, window=None, most=most, backend=backend
    )
    part = jax.jit(attend)(q, tokens, first, k_bases, v_bases, q_positions=lengths[:, None])
    check(part, oracle)
