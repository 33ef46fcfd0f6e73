"""Exact ends in 8 bits: their codes against a float64 oracle, and caches that hold them."""

import dataclasses

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, model, prompts
from hypothesis import given, settings

from lowrank_kv_jax.generation.forward import extend, make_layout, prefill, refresh
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import with_token_layout
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.eight_bits import EightBits, eight_bits_of
from lowrank_kv_jax.storage.state import write_tokens

coded = jax.jit(eight_bits_of, static_argnums=1)
SHAPE = (2, 3, 8, 16)
WIDE, NARROW = (f"transform:sinks=4,recent=8,recent_bits={bits}" for bits in ("none", 8))


def tokens(seed: int) -> np.ndarray:
    """Tokens of very different size."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=SHAPE) * np.exp(rng.normal(scale=4, size=(*SHAPE[:3], 1)))).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16))
def test_tokens_err_by_half_a_step_and_lose_nothing_where_they_are_coded_again(seed):
    x = tokens(seed)
    stored = coded(x, "bfloat16")
    wide = np.asarray(stored.astype(jnp.float32), np.float64)
    step = np.abs(x).max(-1, keepdims=True).astype(np.float64) / 127
    assert (np.abs(wide - x) <= step * (0.5 + 127 * 2.0**-8)).all()  # what rounds the scale moves the largest entry most
    assert np.mean(((wide - x) / step) ** 2) <= 1.1 / 12
    chex.assert_trees_all_equal(coded(wide.astype(np.float32), "bfloat16"), stored)


def test_nothing_is_coded_as_nothing_and_what_is_broken_stays_visible():
    x = np.zeros((1, 1, 4, 8), np.float32)
    x[0, 0, 1, 3], x[0, 0, 2, 3], x[0, 0, 3, 3] = 1e-42, np.nan, np.inf
    wide = np.asarray(coded(x, "bfloat16").astype(jnp.float32))
    np.testing.assert_array_equal(wide[:, :, :2], 0)
    assert np.isnan(wide[0, 0, 2]).all() and np.isnan(wide[0, 0, 3]).all()


def test_writing_codes_the_new_tokens_and_touches_no_other():
    old, new = tokens(1), tokens(2)[:, :, :3]
    stored = coded(old, "float32")
    written = jax.jit(write_tokens)(stored, new, np.array([2, 6]), np.array([3, 1]))
    expected = old.copy()
    expected[0, :, 2:5], expected[1, :, 6] = new[0], new[1, :, 0]
    chex.assert_trees_all_equal(written, coded(expected, "float32"))


# ---- caches


def refreshed(spec: str, layout: str = "rows", chunk: int | None = None):
    """A cache of a ragged batch behind a block and a refresh."""
    method, params = parse_method(spec), model().params
    bases, more = bases_for(method, PLAIN), prompts(seed=3, length=BLOCK)
    cache, _ = prefill(method, PLAIN, params, prompts(length=PROMPT), np.array([PROMPT, 70]), bases=bases, chunk=chunk,
                       capacity=CAPACITY, block=BLOCK, dtype="float32")
    cache = with_token_layout(cache, layout)
    cache, _ = extend(method, PLAIN, params, cache, more, bases=bases)
    return refresh(method, cache, bases=bases)


def decoded(cache):
    """The cache behind three more tokens, and their logits."""
    bases, more = bases_for(cache.method, PLAIN), prompts(seed=4, length=3)
    return extend(cache.method, PLAIN, model().params, cache, more, bases=bases, all_logits=True)


@pytest.mark.parametrize("layout, chunk", [
    ("rows", None), *(pytest.param(*given, marks=pytest.mark.slow) for given in (("lanes", None), ("rows", 40)))])
def test_a_cache_holds_its_ends_in_codes_of_what_it_would_hold(layout, chunk):
    held, logits = decoded(refreshed(NARROW, layout, chunk))
    exact, wanted = decoded(refreshed(WIDE, layout, chunk))
    first, last = held.groups[0].ends[0], with_token_layout(exact, "rows").groups[0].ends[0]
    assert isinstance(first.k, EightBits) and first.k.shape == last.k.shape
    there = np.arange(last.k.shape[2]) < np.asarray(last.length)[:, None]
    for own, other in ((first.k, last.k), (first.v, last.v)):  # of the first layer, whose tokens know of no cache
        step = np.abs(np.asarray(other)).max(-1, keepdims=True) / 127
        close = np.abs(np.asarray(own.astype(jnp.float32)) - np.asarray(other)) <= 1.01 * step
        assert close[np.broadcast_to(there[:, None], close.shape[:3])].all()
    chex.assert_trees_all_equal(first.positions, last.positions)
    assert np.abs(np.asarray(logits) - np.asarray(wanted)).mean() < 0.05 * np.asarray(wanted).std()
    if layout == "rows":
        slots = len(held.length) * PLAIN.num_layers * PLAIN.kv_heads * first.k.shape[2]
        fewer = cache_bytes(exact).total - cache_bytes(held).total
        assert fewer == 2 * slots * (4 * PLAIN.head_dim - PLAIN.head_dim - 2)


def test_kernels_read_them_too(monkeypatch):
    _, on_xla = decoded(refreshed(f"{NARROW},bits=none,rope=post"))
    cache = refreshed(f"{NARROW},bits=none,rope=post,profiles=7")  # whose programs no other test has made
    monkeypatch.setenv("LOWRANK_KV_BACKEND", "triton")
    _, by_kernel = decoded(cache)
    np.testing.assert_allclose(by_kernel, on_xla, atol=2e-3)


@pytest.mark.parametrize("decoding", ["decoding=code", "decoding=keep"])
def test_behind_a_selection_they_are_in_8_bits_where_appended_tokens_leave(decoding):
    method = parse_method(f"{NARROW}+snapkv:budget=24,sinks=4,recent=8,{decoding}")
    layout = make_layout(PLAIN, 2, PROMPT, CAPACITY, BLOCK, "float32")
    cache = abstract_cache(method, layout, bases_for(method, PLAIN))
    assert isinstance(cache.groups[0].ends[0].k, EightBits) == (decoding == "decoding=code")


@pytest.mark.parametrize("bits", [4, 16])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=rf"recent_bits={bits}: must be 8 or None"):
        dataclasses.replace(parse_method(NARROW), recent_bits=bits)
