"""Soft caps of logits (Gemma 2): every op, vote and path of every kind of method has them."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, prompts

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.attention.importance import window_attention
from lowrank_kv_jax.calibration.calibrate import collect_moments, fit_bases
from lowrank_kv_jax.method.votes import prompt_votes, total_attention
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention
from lowrank_kv_jax.selections.reread import attend_twice
from lowrank_kv_jax.storage.block_reads import BLOCK

CAP = 0.7
CAPPED = dataclasses.replace(PLAIN, logit_cap=CAP)
TOKENS = prompts(2, 60)


def heads(seed, count, tokens=24):
    return jax.random.normal(jax.random.key(seed), (2, tokens, count, 8))


def plain(q, k, v):
    """Probabilities `[B, N, T, T]` and outputs by the formula."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    logits = CAP * np.tanh(np.einsum("btnd,bsnd->bnts", q, k) * 0.9 / CAP)
    weights = jax.nn.softmax(jnp.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -jnp.inf), axis=-1)
    return weights, jnp.einsum("bnts,bsnd->btnd", weights, v)


def test_attention_and_votes_of_a_prompt_are_those_of_the_formula():
    q, k, v, lengths = heads(0, 4), heads(1, 2), heads(2, 2), jnp.full((2,), 24, jnp.int32)
    weights, out = plain(q, k, v)
    rule = {"scale": 0.9, "cap": CAP}
    by_head = weights.reshape(2, 2, 2, 24, 24).sum(2)

    @jax.jit
    def found(q, k, v, lengths):
        again = (jnp.concatenate([x, x], axis=1) for x in (q, k, v))
        return (causal_attention(q, k, v, window=None, **rule), prompt_votes(q, k, lengths, total_attention, **rule),
                window_attention(q, k, lengths, 5, **rule), attend_twice(*again, lengths, **rule)[0])

    attended, votes, of_window, twice = found(q, k, v, lengths)
    np.testing.assert_allclose(attended, out, atol=1e-5)
    np.testing.assert_allclose(votes, by_head.sum(2), atol=1e-5)
    np.testing.assert_allclose(of_window, by_head[:, :, -5:].sum(2), atol=1e-5)
    np.testing.assert_allclose(twice[:, :24], out, atol=1e-5)


@functools.cache
def through_cache(spec, config=CAPPED):
    """Logits `[B, 21, V]` from the prompt's last token on."""
    method, model = parse_method(spec), helpers.model(config)
    moments = collect_moments(model, np.asarray(TOKENS)) if method.calibrated else None
    bases = fit_bases(model, method, moments, jnp.float32) if method.calibrated else None
    return helpers.logits_through_a_cache(method, model, TOKENS, bases)


@pytest.mark.parametrize("spec", [
    "h2o:keep=1.0", "shadowkv:rank=1.0,budget=64",
    "transform:bits=8,metric=plain,rope=pre,sampled=False",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "single-svd:rank=1.0,rope=pre", "single-svd:rank=1.0,rope=post", "osp:rank=1.0,rope=pre,chunk_length=16",
        "osp:rank=1.0,rope=post,chunk_length=16", "xkv:group=3,rank=1.0",
        "transform:bits=8,metric=plain,rope=post,sampled=False", "transform:bits=8,metric=plain,rope=tile,sampled=False", "snapkv:keep=1.0",
    )),
])
def test_at_full_quality_a_cache_of_capped_logits_is_the_full_one(spec):
    exact = through_cache("full")
    assert np.abs(exact - through_cache("full", PLAIN)).max() > 0.1
    np.testing.assert_allclose(through_cache(spec), exact, atol=0.3 if "bits" in spec else 3e-4)


@pytest.mark.parametrize("spec", ["momentkv:keep=0.5", "streamingllm:keep=0.5+moments"])
def test_moments_of_exponentials_are_refused(spec):
    with pytest.raises(ValueError, match=r"sums up dropped tokens .* \(logit_cap=0.7\)"):
        through_cache(spec)


def test_a_cap_is_a_positive_number():
    with pytest.raises(ValueError, match="logit_cap=0.0: must be a finite number above 0, or None"):
        dataclasses.replace(PLAIN.attention, logit_cap=0.0)


def test_without_a_cap_logits_are_products():
    assert logits_of(jnp.float32(3.0), 2.0, None) == 6.0


@pytest.mark.parametrize("backend", ["triton", "tpu"])
def test_kernels_leave_caps_to_xla(backend, monkeypatch):
    monkeypatch.setattr(dispatch, "_warn_once", lambda op, chosen, reason: seen.append((op, reason)))
    seen = []
    q, k, v = (heads(seed, count, BLOCK + 8) for seed, count in enumerate((4, 2, 2)))  # one block is XLA's anyway
    _, out = plain(q, k, v)
    got = causal_attention(q, k, v, window=None, scale=0.9, cap=CAP, backend=backend)
    np.testing.assert_allclose(got, out, atol=1e-5)
    assert seen == [("causal_attention", "logits that are capped")]
