"""Steps by each prompt's deviations, against a float64 oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, model, prompts, random_moments, softmax_attention
from transform_oracle import LAYOUT, SIZE, SPEC, oracle, ratios_of, tokens_like

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.generation.forward import make_layout, prefill
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.method.accounting import full_cache_bytes
from lowrank_kv_jax.methods import Transform
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.positions import Runs

NO_GAPS = Runs(jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2), jnp.int32))


def deviating(moments, layers, factors, count=SIZE):
    """Queries, and tokens of each layer whose deviations from the calibrated means are so many times larger, by row."""
    factors = jnp.asarray(factors)[:, None, None, None]

    def scaled(x, tap, layer):
        mean = jnp.asarray(moments.mean(tap)[layer].reshape(SPEC.kv_heads, SPEC.head_dim), jnp.float32)
        return mean + factors * (x - mean)

    found = [tokens_like(moments, layer, 0, count) for layer in layers]  # the same draw: layers are correlated
    tokens = tuple(x._replace(k_pre=scaled(x.k_pre, "k_pre", i), v=scaled(x.v, "v", i)) for i, (_, x) in zip(layers, found, strict=True))
    angles = [x[:, :, None] for x in rope_angles(SPEC.rope, tokens[0].positions)]
    return found[-1][0], tuple(x._replace(k=rotate(x.k_pre, *angles)) for x in tokens)


def stored(method, layout, bases, tokens, weight):
    """A prompt's tokens, coded."""
    @jax.jit
    def through(bases, tokens, weight):
        counts = jnp.full((2,), tokens[0].k.shape[1])
        store = method.empty(layout, bases, tokens[0].k.shape[1])
        store = method.learn(layout, bases, store, tokens, counts, weight)
        return method.take_in(layout, bases, store, tokens, counts, counts, NO_GAPS)

    return through(bases, tokens, weight)


def decoded(method, layout, bases, store, index):
    """Keys after RoPE and values `[B, T, K, D]`."""
    @jax.jit
    def through(bases, store):
        codes = (x.read_block(0, x.shape[2]) for x in (store.tokens.k, store.tokens.v))
        return method.decode(layout, bases, store, *codes, NO_GAPS, index)

    return [np.asarray(x).swapaxes(1, 2) for x in through(bases, store)]


@pytest.mark.parametrize("spec, means, dtype", [
    ("bits=2,group=3", True, "float32"), ("bits=3,heads=per_head,rope=post", True, "bfloat16"),
    ("bits=1.5,means=calibrated", True, "bfloat16"),
    ("bits=4,heads=per_head,rope=post,means=calibrated,metric=plain", False, "float32"),  # queries meet the codes, of votes too
])
def test_ratios_and_what_is_read_back_equal_the_oracle(spec, means, dtype):
    method, layout = parse_method(f"transform:{spec},steps=prompt"), dataclasses.replace(LAYOUT, dtype=dtype)
    moments = random_moments(PLAIN, means=means, group=method.group)
    bases = method.fit(SPEC, moments)[0]
    q, tokens = deviating(moments, range(bases.layers), [3.0, 0.5])
    weight = (jnp.arange(SIZE)[None] < jnp.asarray([[SIZE], [17]])).astype(jnp.float32)
    store, last = stored(method, layout, bases, tokens, weight), bases.layers - 1
    read = []
    for side, name in (("k", method.keys), ("v", "v")):
        layers, runs = [getattr(x, name) for x in tokens], getattr(store.tokens, side).runs
        around, own = getattr(store, f"{side}_mean"), getattr(store, f"{side}_step")
        expected = ratios_of(bases, side, layers, runs, weight, around)
        assert own.dtype == dtype and own.shape == expected.shape and (around is None) == (method.means == "calibrated")
        np.testing.assert_allclose(np.asarray(own, np.float64), expected, rtol=1e-5 if dtype == "float32" else 2**-8)
        wide = dict(runs).get(8, 0)
        assert (np.asarray(own[..., :wide]) == 1).all() and wide < own.shape[-1]
        read.append(oracle(bases, side, layers, runs, around, own)[last])  # by the steps as they are stored
    k, v = read
    if method.rope == "pre":
        angles = rope_angles(SPEC.rope, jnp.broadcast_to(jnp.arange(SIZE), (2, SIZE)))
        k = np.asarray(rotate(jnp.asarray(k, jnp.float32), *(x[:, :, None] for x in angles)))
    for found, expected in zip(decoded(method, layout, bases, store, last), (k, v), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3)
    at, place = jnp.full((2, 3), 90), Place(index=last)
    part, votes = jax.jit(lambda bases, store, q: (
        method.attend(layout, bases, store, q, at, place), method.logits(layout, bases, store, q, place)
    ))(bases, store, q)
    out, lse = softmax_attention(q, k, v, np.ones((2, 3, SIZE), bool), SPEC.scale)
    np.testing.assert_allclose(part.lse, lse, atol=1e-3)
    np.testing.assert_allclose(part.out, out, atol=4e-3)
    assert hasattr(votes.keys, "read_block") == (not means)
    keys = jnp.repeat(votes.keys if means else votes.keys.read_block(0, SIZE), SPEC.group_size, axis=1)
    np.testing.assert_allclose(jnp.einsum("btnd,bnsd->btns", votes.q, keys),
                               np.einsum("btnd,bsnd->btns", q, np.repeat(k, SPEC.group_size, axis=2)), atol=4e-3)


@pytest.mark.parametrize("spec", ["bits=2.5", "bits=4,heads=per_head,rope=post", "bits=3,group=2"])
def test_a_prompt_of_four_times_the_deviation_is_read_back_far_better(spec):
    method = parse_method(f"transform:{spec},metric=plain")
    moments = random_moments(PLAIN, means=True, group=method.group)
    bases, errors = method.fit(SPEC, moments)[0], {}
    _, tokens = deviating(moments, range(bases.layers), [4.0, 1.0], count=400)
    for own in (method, dataclasses.replace(method, steps="prompt")):
        store = stored(own, LAYOUT, bases, tokens, jnp.ones((2, 400)))
        _, read = decoded(own, LAYOUT, bases, store, bases.layers - 1)
        errors[own.steps] = np.mean((read - np.asarray(tokens[-1].v)) ** 2, axis=(1, 2, 3))
    assert errors["prompt"][0] < 0.2 * errors["calibrated"][0]
    np.testing.assert_allclose(errors["prompt"][1], errors["calibrated"][1], rtol=0.1)  # deviates as the calibration's


def test_padding_does_not_count_and_a_row_without_tokens_has_the_calibrated_steps():
    method, tokens, lengths = Transform(steps="prompt", sinks=4, recent=8), prompts(3, 96), jnp.array([96, 50, 12])
    stores = []
    for padding in (0, 5):
        padded = jnp.where(jnp.arange(96) < lengths[:, None], tokens, padding)
        cache, _ = prefill(method, PLAIN, model().params, padded, lengths, bases=bases_for(method), capacity=160, block=16)
        stores.append([group.store for group in cache.groups])
    for one, other in zip(*stores, strict=True):
        for side in ("k_step", "v_step"):
            np.testing.assert_array_equal(getattr(one, side), getattr(other, side))
            assert [(np.asarray(row) == 1).all() for row in getattr(one, side)] == [False, False, True]


def test_floats_have_no_steps_bases_are_the_same_and_ratios_stay_within_their_bounds():
    method = Transform(steps="prompt", bits=2.0)
    assert method.fit_key(SPEC) == Transform(bits=2.0).fit_key(SPEC)
    floats = dataclasses.replace(method, bits=None)
    assert floats.empty(LAYOUT, bases_for(floats)[0], SIZE).k_step is None
    assert Transform().empty(LAYOUT, bases_for(Transform())[0], SIZE).v_step is None
    moments = random_moments(PLAIN, means=True)
    bases = method.fit(SPEC, moments)[0]
    _, tokens = deviating(moments, range(1), [1e25, 0.0], count=4000)  # whose squares are not finite
    store = stored(method, LAYOUT, bases, tokens, jnp.ones((2, 4000)).at[:, -1].set(0.0))
    below = dict(store.tokens.v.runs).get(8, 0)
    assert (np.asarray(store.v_step[0, :, below:]) == 4).all() and (np.asarray(store.v_step[1, :, below:]) == 0.25).all()


def test_bytes_of_steps_are_within_what_is_asked_for():
    """On every rung, of groups that differ in their components: one number each and row, no more than `smaller` foretells."""
    for spec in ("smaller=4,group=2", "smaller=6,heads=per_head", "smaller=10"):
        sizes = []
        for steps in ("calibrated", "prompt"):
            method = parse_method(f"transform:{spec},steps={steps},sinks=2,recent=4")
            bases = bases_for(method)
            layout = make_layout(PLAIN, 2, 512, 512, 4, jnp.bfloat16)
            cache = abstract_cache(method, layout, bases)
            sizes.append(lkv.cache_bytes(cache))
            assert full_cache_bytes(SPEC, 2 * 512) / method.smaller * 1.015 >= sizes[-1].total
        held = sum(x.size for group in cache.groups for x in (group.store.k_step, group.store.v_step))
        assert sizes[1].by_kind["bases"] - sizes[0].by_kind["bases"] == 2 * held
        assert sizes[1].by_kind["coefficients"] <= sizes[0].by_kind["coefficients"]
