"""Sink logits (gpt-oss): partials, prefill, the second reading, gradients, and every kind of cache have them."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import softmax
from helpers import PLAIN, empty_partial, prompts

from lowrank_kv_jax.attention.importance import window_attention
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.sink_logits import probabilities, with_sink
from lowrank_kv_jax.calibration.backward import attend_exactly
from lowrank_kv_jax.calibration.calibrate import collect_moments, fit_bases
from lowrank_kv_jax.method.votes import prompt_votes, total_attention
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention
from lowrank_kv_jax.selections.reread import attend_twice
from lowrank_kv_jax.storage.block_reads import BLOCK

SINKS = np.array([2.0, -1.0, 4.0, 0.5], np.float32)
WITH_SINKS = dataclasses.replace(PLAIN, sink_logits=True, windows=(None, 24, None))
TOKENS = prompts(2, 60)


def heads(seed, count, tokens=24):
    return np.random.default_rng(seed).normal(size=(2, tokens, count, 8)).astype(np.float32)


def plain(q, k, v, window=None, scale=0.9):
    """Probabilities `[B, N, T, T]` and outputs by the formula, float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    logits = np.where(seen, np.einsum("btnd,bsnd->bnts", q, k) * scale, -np.inf)
    weights = softmax(logits, SINKS.astype(np.float64)[:, None, None])
    return weights, np.einsum("bnts,bsnd->btnd", weights, v)


def test_a_sink_is_a_token_whose_value_is_zero():
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(3, 5, 4, 7)), rng.normal(size=(3, 7, 4, 8))
    lse = np.logaddexp.reduce(logits, axis=-1)
    part = AttnPartial(np.einsum("btns,bsnd->btnd", np.exp(logits - lse[..., None]), values), lse)
    found = with_sink(AttnPartial(*(jnp.asarray(x, jnp.float32) for x in part)), jnp.asarray(SINKS))
    whole = np.logaddexp(lse, SINKS)
    np.testing.assert_allclose(found.lse, whole, atol=1e-6)
    np.testing.assert_allclose(found.out, part.out * np.exp(lse - whole)[..., None], atol=1e-6)
    shares = probabilities(jnp.asarray(logits, jnp.float32), jnp.asarray(SINKS), heads=(2,))
    np.testing.assert_allclose(shares, np.exp(logits - whole[..., None]), atol=1e-6)
    nothing = with_sink(empty_partial(1, 1, 4, 8), jnp.asarray(SINKS))
    np.testing.assert_array_equal(nothing.lse[0, 0], SINKS)
    assert not nothing.out.any()


@pytest.mark.parametrize("window", [None, 5])
def test_attention_and_votes_of_a_prompt_are_those_of_the_formula(window):
    q, k, v, lengths = heads(0, 4), heads(1, 2), heads(2, 2), jnp.full((2,), 24, jnp.int32)
    weights, out = plain(q, k, v, window)
    rule = {"scale": 0.9, "sink_logits": SINKS}

    def of(op, *args, **given):
        return np.asarray(jax.jit(functools.partial(op, **given, **rule))(*args))

    np.testing.assert_allclose(of(causal_attention, q, k, v, window=window), out, atol=1e-5)
    copies = (np.concatenate([x, x], axis=1) for x in (q, k, v))
    twice = of(lambda *args, **given: attend_twice(*args, **given)[0], *copies, lengths, window=window)
    np.testing.assert_allclose(twice[:, :24], out, atol=1e-5)
    if window is None:
        by_head = weights.reshape(2, 2, 2, 24, 24).sum(2)
        np.testing.assert_allclose(of(prompt_votes, q, k, lengths, vote=total_attention), by_head.sum(2), atol=1e-5)
        np.testing.assert_allclose(of(window_attention, q, k, lengths, window=5), by_head[:, :, -5:].sum(2), atol=1e-5)


def test_what_calibration_differentiates_is_the_formula():
    config = dataclasses.replace(WITH_SINKS, q_heads=4, kv_heads=2)
    q, k, v = heads(0, 4), heads(1, 2), heads(2, 2)

    def total(k, sinks):
        return jnp.sum(jnp.square(attend_exactly(config, 5, q, k, v, sinks)))

    _, out = plain(q, k, v, 5, config.attention.scale)
    np.testing.assert_allclose(attend_exactly(config, 5, q, k, v, jnp.asarray(SINKS)), out, atol=1e-5)
    slope = jax.grad(total)(k, jnp.asarray(SINKS))
    step = np.zeros_like(k)
    step[0, 9, 1, 3] = 1e-3
    wanted = [(plain(q, k + sign * step, v, 5, config.attention.scale)[1] ** 2).sum() for sign in (1, -1)]
    np.testing.assert_allclose(slope[0, 9, 1, 3], (wanted[0] - wanted[1]) / 2e-3, rtol=1e-3)


@functools.cache
def model(sinks=3.0):
    """With sinks that take much of the attention."""
    found = helpers.model(WITH_SINKS)
    layers = [{**layer, "attention": layer["attention"] | {"sinks": layer["attention"]["sinks"] + sinks}}
              for layer in found.params["layers"]]
    return dataclasses.replace(found, params=found.params | {"layers": tuple(layers)})


def through_cache(spec, tiny):
    """Logits `[B, 21, V]` from the prompt's last token on."""
    method, bases = parse_method(spec), None
    if method.calibrated:
        bases = fit_bases(tiny, method, collect_moments(tiny, np.asarray(TOKENS)), jnp.float32)
    return helpers.logits_through_a_cache(method, tiny, TOKENS, bases)


@functools.cache
def exact():
    return through_cache("full", model())


def test_sinks_matter():
    assert np.abs(exact() - through_cache("full", model(-1e9))).max() > 0.1


@pytest.mark.parametrize("spec", [
    "ojakv:rank=1.0", *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "momentkv:keep=1.0", "kvzip:keep=1.0,layers=uniform", "kivi:bits=none", "snapkv:keep=1.0", "xkv:group=3,rank=1.0", "quest:keep=1.0")),
])
def test_at_full_quality_every_kind_of_cache_is_the_full_one(spec):
    np.testing.assert_allclose(through_cache(spec, model()), exact(), atol=3e-4)


def test_a_backend_attends_with_sinks_or_leaves_them_to_xla(monkeypatch):
    monkeypatch.setattr(dispatch, "_warn_once", lambda op, chosen, reason: seen.append((op, chosen)))
    monkeypatch.setattr(dispatch, "interpreted", lambda backend: False)  # cuDNN would say first that it takes a GPU
    seen = []
    q, k, v = (heads(seed, count, BLOCK + 8) for seed, count in enumerate((4, 2, 2)))  # one block is XLA's anyway
    got = causal_attention(q, k, v, jnp.asarray(SINKS), window=None, scale=0.9, backend="triton")
    np.testing.assert_allclose(got, plain(q, k, v)[1], atol=1e-5)
    assert seen == [("causal_attention", "triton")]
