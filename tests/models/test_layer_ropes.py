"""Layers that differ in RoPE (SmolLM3's without positions): every part of a method sees a layer's own."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, prompts

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import RopeSpec, apply_rope
from lowrank_kv_jax.calibration.calibrate import collect_moments, iterate_taps
from lowrank_kv_jax.calibration.sensitivity import collect_sensitivity
from lowrank_kv_jax.codecs.transform_metrics import attention as attention_metric
from lowrank_kv_jax.methods.parse import parse_method

FAST = RopeSpec(100.0, 4)
MIXED = dataclasses.replace(PLAIN, ropes=(PLAIN.rope, None, FAST))
TOKENS = prompts(2, 60)


def through_cache(method, bases=None, config=MIXED):
    """Logits `[B, 21, V]` from a prompt's last token on."""
    return helpers.logits_through_a_cache(method, helpers.model(config), TOKENS, bases)


def fitted(method):
    return lkv.calibration.calibrate.fit_bases(
        helpers.model(MIXED), method, collect_moments(helpers.model(MIXED), np.asarray(TOKENS)), jnp.float32
    )


@pytest.mark.parametrize("spec", [
    "static-pca:rank=1.0,rope=pre",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "transform:bits=8,metric=attention,sampled=False", "single-svd:rank=1.0,rope=pre", "h2o:keep=1.0,positions=cache",
        "osp:rank=1.0,rope=pre,chunk_length=16", "shadowkv:rank=1.0,budget=64",
    )),
])
def test_at_full_quality_a_cache_is_the_full_one(spec):
    method = parse_method(spec)
    logits = through_cache(method, fitted(method) if method.calibrated else None)
    np.testing.assert_allclose(logits, through_cache(parse_method("full")), atol=0.3 if "bits" in spec else 3e-4)


def test_keys_are_coded_before_the_rotation_of_their_own_layer():
    """At half the rank: what was rebuilt of the keys before RoPE, turned by hand as the layer turns them."""
    method = parse_method("single-svd:rank=4,rope=pre,sinks=0,recent=0")
    config, params = MIXED, helpers.model(MIXED).params
    layout = lkv.generation.forward.make_layout(config, 2, 40, 64, 10, jnp.float32)
    lengths = jnp.full((2,), 40, jnp.int32)
    at = jnp.broadcast_to(jnp.arange(40), (2, 40))
    q = jax.random.normal(jax.random.key(0), (2, 1, PLAIN.q_heads, PLAIN.head_dim))

    @functools.partial(jax.jit, static_argnums=0)
    def read(own, taps):
        machine = lkv.methods.machine_of(method)
        state = lkv.generation.groups.compress_group(method, own, None, (taps,), lengths)
        got = machine.attend(own, None, state, q, jnp.full((2, 1), 40), helpers.Place()).out
        return got, *(x[:, :, :40].swapaxes(1, 2) for x in method.rebuilt(own, None, state.store))

    @functools.partial(jax.jit, static_argnums=0)
    def attended(rope, keys, values):
        keys, values = (jnp.repeat(y, 2, axis=2) for y in (apply_rope(rope, keys, at), values))
        weights = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", q, keys) * config.attention.scale, axis=-1)
        return jnp.einsum("bnts,bsnd->btnd", weights, values)

    for layer, taps in enumerate(iterate_taps(config, params, TOKENS[:, :40])):
        np.testing.assert_allclose(apply_rope(config.ropes[layer], taps.k_pre, at), taps.k, atol=1e-5)
        got, rebuilt, values = read(layout.of_layer(layer), taps)
        assert 0.01 < jnp.linalg.norm(rebuilt - taps.k_pre) / jnp.linalg.norm(taps.k_pre) < 0.7
        np.testing.assert_allclose(got, attended(config.ropes[layer], rebuilt, values), atol=1e-4)


def test_decoders_of_ones_own_plan_each_layer_for_its_rope():
    plans = lkv.plan_layers("single-svd:rank=0.5,rope=pre", MIXED.attention, prompt=32)
    assert [plan.layout.spec.rope for plan in plans] == list(MIXED.ropes)
    assert plans[0].layout.spec.ropes is None


def test_layers_that_share_a_store_must_share_their_rope():
    with pytest.raises(ValueError, match="'xkv' stores layers 0 to 1 together; this model's differ in RoPE"):
        through_cache(parse_method("xkv:group=2,rank=1.0"))
    with pytest.raises(ValueError, match="differ in RoPE"):
        lkv.Calibrator(MIXED.attention, "transform:group=3")
    with pytest.raises(ValueError, match="rotary=True: this model does not rotate all channels"):
        parse_method("osp:rank=4,rope=pre,rotary=true").validate(MIXED.attention)


@pytest.mark.parametrize("change, message", [
    ({"ropes": (None, None, None)}, "ropes: must hold one entry for each of 3 layers, rope among them"),
    ({"ropes": (PLAIN.rope, None)}, "ropes: must hold one entry for each of 3 layers"),
    ({"ropes": (PLAIN.rope, RopeSpec(100.0, 10), None)}, "rope.rotary_dim=10: must be at most head_dim=8"),
])
def test_a_spec_whose_ropes_do_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN.attention, **change)


def test_calibration_sees_each_layer_s_own_rope():
    """Where nothing turns, moments before and after RoPE are one, and so are the gradients by keys."""
    moments = collect_moments(helpers.model(MIXED), np.asarray(TOKENS))
    gradients = collect_sensitivity(helpers.model(MIXED), np.asarray(TOKENS))
    for before, after in ((moments.k_pre, moments.k), (moments.q_pre, moments.q), (gradients.k_pre, gradients.k)):
        assert [np.allclose(x, y, rtol=1e-4) for x, y in zip(before, after, strict=True)] == [False, True, False]
    weight = attention_metric(MIXED.attention, moments, "k_pre").k
    paired = [np.allclose(weight[..., :half], weight[..., half : 2 * half]) for half in (4, 2)]
    assert paired == [False, False] and np.allclose(weight[0, :, :4], weight[0, :, 4:])
    assert np.allclose(weight[2, :, :2], weight[2, :, 2:4])
