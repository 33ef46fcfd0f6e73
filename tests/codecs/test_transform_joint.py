"""Keys and values in one basis and one code, against a float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, random_moments, softmax_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from transform_oracle import LAYOUT, SIZE, SPEC, basis_of, oracle_of_both, tokens_like

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.codecs.transform_bases import principal
from lowrank_kv_jax.codecs.transform_joint import principal_of_both
from lowrank_kv_jax.codecs.transform_metrics import METRICS
from lowrank_kv_jax.estimators.bit_allocation import DISTORTION, widths_at
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.positions import Runs

COUNTS = jnp.array([SIZE, 17])
WHERE = Runs(jnp.zeros((2, 2), jnp.int32), jnp.stack([jnp.full((2,), 4), jnp.zeros((2,))], 1).astype(jnp.int32))


def fitted(spec):
    """A method, its moments and bases of its first group, queries of its last layer and tokens of all."""
    method = parse_method(f"transform:kv=joint,{spec}")
    moments = random_moments(PLAIN, means=True, group=method.group)
    bases = method.fit(SPEC, moments)[0]
    q, tokens = zip(*(tokens_like(moments, layer, layer) for layer in range(bases.layers)), strict=True)
    return method, bases, q[-1], tokens


def turned(k, tokens):
    """Keys `[B, T, K, D]` after RoPE."""
    angles = rope_angles(SPEC.rope, tokens[0].positions)
    return np.asarray(rotate(jnp.asarray(k, jnp.float32), *(x[:, :, None] for x in angles)))


@pytest.mark.parametrize("spec", [
    "bits=3.3,heads=per_head,rope=post", "bits=1.5,group=3", "bits=2,group=2,rope=post,metric=plain,steps=prompt",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "bits=2", "bits=3,group=2,heads=per_head", "bits=2,metric=attention,steps=prompt")),
])
def test_attention_over_one_code_equals_the_oracle(spec):
    method, bases, q, tokens = fitted(spec)
    last, at = bases.layers - 1, jnp.full((2, 3), 90)
    weight = (jnp.arange(SIZE)[None] < COUNTS[:, None]).astype(jnp.float32)

    @jax.jit
    def through(bases, q, tokens):
        store = method.learn(LAYOUT, bases, method.empty(LAYOUT, bases, SIZE), tokens, COUNTS, weight)
        store = method.take_in(LAYOUT, bases, store, tokens, COUNTS, COUNTS, WHERE)
        place = Place(index=last)
        return store, method.attend(LAYOUT, bases, store, q, at, place), method.logits(LAYOUT, bases, store, q, place)

    store, part, votes = through(bases, q, tokens)
    assert store.tokens.k.codes.dtype == jnp.uint8 and store.tokens.v.shape[-1] == 0
    assert (store.k_step is None) == (method.steps == "calibrated") and store.v_step is None
    keys, values = [getattr(x, method.keys) for x in tokens], [x.v for x in tokens]
    k, v = (read[last] for read in oracle_of_both(bases, keys, values, store.tokens.k.runs, (store.k_mean, store.v_mean),
                                                  store.k_step))
    k = turned(k, tokens) if method.rope == "pre" else k
    seen = np.broadcast_to(np.arange(SIZE) < np.asarray(COUNTS)[:, None, None], (2, 3, SIZE))
    out, lse = softmax_attention(q, k, v, seen, SPEC.scale)
    np.testing.assert_allclose(part.lse, lse, atol=1e-3)
    np.testing.assert_allclose(part.out, out, atol=2e-3)
    heads = np.repeat(k, SPEC.group_size, axis=2)
    np.testing.assert_allclose(
        np.einsum("btnd,bnsd->btns", votes.q, np.repeat(votes.keys, SPEC.group_size, 1)),
        np.einsum("btnd,bsnd->btns", q, heads), atol=2e-3)


@pytest.mark.parametrize("spec", ["bits=none", "bits=none,group=3,heads=per_head,rope=post"])
def test_every_component_as_a_float_is_exact(spec):
    method, bases, _, tokens = fitted(spec)
    where = Runs(*2 * [jnp.zeros((2, 2), jnp.int32)])

    @jax.jit
    def through(bases, tokens):
        store = method.take_in(LAYOUT, bases, method.empty(LAYOUT, bases, SIZE), tokens, COUNTS, COUNTS, where)
        return store, method.decode(LAYOUT, bases, store, store.tokens.k, store.tokens.v, where, bases.layers - 1)

    store, (k, v) = through(bases, tokens)
    np.testing.assert_allclose(v.swapaxes(1, 2)[0], tokens[-1].v[0], atol=1e-4)
    assert np.isfinite(k).all() and store.tokens.k.shape[-1] == 2 * basis_of(bases, "k").shape[1]


@given(st.integers(0, 2**16), st.floats(-5, 0), st.sampled_from([(1, 1), (1, 4), (3, 1), (3, 4)]), st.sampled_from(["k", "k_pre"]))
@settings(max_examples=20, deadline=None)
def test_at_no_price_do_errors_and_bits_cost_more_than_apart(seed, exponent, shape, tap):
    """What a component costs is concave in its variance, and joint components spread what they have the most."""
    group, units = shape
    moments = random_moments(PLAIN, seed, means=True, group=group)
    metric, layers = METRICS["loss"](SPEC, moments, tap), tuple(range(group))
    apart = [principal(SPEC, moments, name, layers, units, weight) for name, weight in ((tap, metric.k), ("v", metric.v))]
    k, v = principal_of_both(SPEC, moments, tap, layers, units, metric)
    found, price = [], np.exp(exponent) * max(side.variances.max() for side in apart)
    for variances in (k.variances, np.concatenate([side.variances for side in apart], axis=1)):
        widths = widths_at(variances, price)
        found.append((variances * np.vectorize(DISTORTION.get)(widths) + price * widths).sum())
    assert found[0] <= found[1] * (1 + 1e-9)
    np.testing.assert_allclose(k.variances.sum(), sum(side.variances.sum() for side in apart), rtol=1e-6)
    np.testing.assert_array_equal(k.variances, v.variances)


def test_the_halves_are_of_one_orthonormal_basis():
    for spec in ("bits=8", "bits=8,group=3,heads=per_head,metric=plain"):
        _, bases, _, _ = fitted(spec)
        whole = np.concatenate([basis_of(bases, side) for side in "kv"], axis=1)
        there = np.asarray(bases.k_scale) > 2e-5 * np.asarray(bases.k_scale).max(-1, keepdims=True)
        product = np.einsum("jwr,jwq->jrq", whole, whole) - np.eye(whole.shape[-1])
        assert np.abs(product * there[:, None] * there[:, :, None]).max() < 0.05
        assert (np.diff(np.asarray(bases.k_scale), axis=-1) <= 1e-6).all()


def test_what_keys_and_values_share_is_stored_once():
    """Values that are keys, turned: at as many bytes one code errs far less in both."""
    moments = random_moments(PLAIN, means=True)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(32, 32)))[0]
    k, mean = np.asarray(moments.k_pre, np.float64), np.asarray(moments.k_pre_sum, np.float64)
    by_values = {(i,): own._replace(k_pre=k[i] @ turn) for i, own in enumerate(k for k in moments.keys_by_values.values())}
    moments = moments._replace(v=turn.T @ k @ turn, v_sum=mean @ turn, keys_by_values=by_values, sampled=None)
    _, tokens = tokens_like(moments, count=400)
    tokens = tokens._replace(v=(tokens.k_pre.reshape(2, 400, -1) @ jnp.asarray(turn, jnp.float32)).reshape(tokens.v.shape))
    errors = {}
    for kv in ("apart", "joint"):
        method = parse_method(f"transform:bits=1.5,metric=plain,sampled=False,means=calibrated,kv={kv}")
        bases, counts = method.fit(SPEC, moments)[0], jnp.full((2,), 400)
        where = Runs(*2 * [jnp.zeros((2, 2), jnp.int32)])
        layout = dataclasses.replace(LAYOUT, prompt=400, capacity=500)

        @jax.jit
        def values(bases, method=method, layout=layout, counts=counts, where=where):
            store = method.take_in(layout, bases, method.empty(layout, bases, 400), (tokens,), counts, counts, where)
            codes = [x.read_block(0, 400) if hasattr(x, "read_block") else x for x in (store.tokens.k, store.tokens.v)]
            return method.decode(layout, bases, store, *codes, where, 0)[1]

        v = values(bases)
        errors[kv] = np.mean((np.asarray(v).swapaxes(1, 2) - tokens.v) ** 2)
    assert errors["joint"] < 0.4 * errors["apart"]
