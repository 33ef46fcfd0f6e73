"""Caches of a decoder of one's own, saved and restored: arrays alone, no model."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowrank_kv_jax as lkv
from lowrank_kv_jax.saving.fingerprint import fingerprint_of

SPEC = lkv.AttentionSpec(
    num_layers=2, q_heads=4, kv_heads=2, head_dim=8, rope=lkv.RopeSpec(10000.0, 8), context=64, windows=(None, 16),
)
WEIGHTS = {"embed": jnp.arange(6.0).reshape(2, 3), "layers": [{"q": jnp.ones((2, 2), jnp.bfloat16)}] * 2}
PROMPT, LENGTHS = 24, np.array([24, 17])
PCA, XKV = "static-pca:rank=4,sinks=2,recent=4", "xkv:rank=4,group=2,sinks=2,recent=4"


def taps(positions, seed=0):
    q, k, v = (jax.random.normal(jax.random.key(seed + n), (*positions.shape, 4 if n == 0 else 2, 8)) for n in range(3))
    return lkv.rotary_taps(SPEC, q, k, v, positions)


@functools.cache
def made(method):
    """Plans and the caches of two prompts."""
    prompt = [taps(jnp.broadcast_to(jnp.arange(PROMPT), (2, PROMPT)), seed) for seed in (0, 5)]
    calibrator = lkv.Calibrator(SPEC, method)
    calibrator.add(prompt, LENGTHS)
    plans = lkv.plan_layers(method, SPEC, prompt=PROMPT, capacity=40, block=4, bases=calibrator.bases(method))
    layers = iter(prompt)
    return plans, [lkv.prefill_layer(plan, [next(layers) for _ in plan.windows], LENGTHS) for plan in plans]


def continued(plan, cache):
    """The caches and the answers of a few tokens, one layer of the group after the other."""
    out, cache = [], lkv.fork(cache)
    for seed, _ in enumerate(plan.windows):
        cache, attended = lkv.append_and_attend(plan, cache, taps(cache.positions(3), 20 + seed))
        out.append(attended)
    return lkv.refresh_layer(plan, cache), out


@pytest.mark.parametrize("method, compress", [(PCA, False), (PCA, True), (XKV, False)])
def test_restored_layers_continue_as_the_saved_ones(method, compress, tmp_path):
    plans, caches = made(method)
    lkv.save_layers(tmp_path / "own", plans, caches, WEIGHTS, compress=compress)
    restored = lkv.load_layers(tmp_path / "own", plans, WEIGHTS)
    chex.assert_trees_all_equal_structs(restored, caches)
    assert lkv.cache_bytes(restored) == lkv.cache_bytes(caches)
    for plan, *pair in zip(plans, restored, caches, strict=True):
        chex.assert_trees_all_equal(*(continued(plan, cache) for cache in pair))


@pytest.mark.parametrize("method", [PCA, *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
    "kivi:group=8,recent=4", "kivi:group=8,recent=4+adakv:budget=12,recent=4", "quest:page=16,keep=0.5,sinks=2,recent=4,dense_layers=0"))])
def test_rows_and_layout_are_those_of_the_save(method, tmp_path):
    plans, caches = made(method)
    one = [lkv.with_token_layout(lkv.take_rows(cache, [1]), "lanes") for cache in caches]
    lkv.save_layers(tmp_path / "own", plans, one, "v1")
    chex.assert_trees_all_equal(lkv.load_layers(tmp_path / "own", plans, "v1"), one)


def test_refusals_name_the_reason(tmp_path):
    (plans, caches), path = made(PCA), tmp_path / "own"
    lkv.save_layers(path, plans, caches, WEIGHTS)
    other = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1), WEIGHTS)
    for weights, told in ((other, "'weights'"), ("v1", "'v1'")):
        with pytest.raises(ValueError, match=f"own: these caches belong to 'weights' .*, not to {told} "):
            lkv.load_layers(path, plans, weights)
    turned = dataclasses.replace(SPEC, rope=lkv.RopeSpec(5e5, 8))
    bases = [plan.bases.codec for plan in plans]
    changes = (
        ("snapkv:keep=0.5", SPEC, None, "were made by StaticPCA.*, not by SnapKV"), (PCA, turned, bases, "another AttentionSpec"),
        (PCA, SPEC, bases[::-1], "other calibrated bases"),
    )
    for method, spec, given, message in changes:
        with pytest.raises(ValueError, match=message):
            lkv.load_layers(path, lkv.plan_layers(method, spec, prompt=PROMPT, bases=given), WEIGHTS)
    with pytest.raises(ValueError, match="another AttentionSpec than that of the 1 plans given"):
        lkv.load_layers(path, plans[:1], WEIGHTS)
    with pytest.raises(ValueError, match="kind='layers': must be 'cache'"):
        lkv.load_cache(path, plans[0].method, None)
    with pytest.raises(FileNotFoundError, match="no saved layers here"):
        lkv.load_layers(tmp_path, plans, WEIGHTS)
    with pytest.raises(ValueError, match="weights='': must be a pytree of arrays, or a text"):
        lkv.load_layers(path, plans, "")


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    plans, caches = made(PCA)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), caches[0])
    (joint,), (group,) = made(XKV)
    half, _ = lkv.append_and_attend(joint, lkv.fork(group), taps(group.positions()))
    for given, own, message in (
        (plans, caches[:1], "caches of 1 plans: 2 were given"), (plans[:1], [stacked], r"length \(2, 2\): must be \(2,\)"),
        ([joint], [half], r"caches\[0\]: stands before layer 1 of a group of 2"), (plans, [group, group], "this cache was made by"),
        (plans, [caches[0], lkv.take_rows(caches[1], [0])], r"caches\[1\].layout=.*must be that of caches\[0\]"),
        ("full", caches, "plans='full': must be what plan_layers returned"),
    ):
        with pytest.raises(ValueError, match=message):
            lkv.save_layers(tmp_path / "own", given, own, WEIGHTS)
    assert not list(tmp_path.iterdir())


def test_weights_are_known_by_their_numbers():
    name, found = fingerprint_of(WEIGHTS)
    copied = jax.tree.map(np.asarray, {"layers": WEIGHTS["layers"], "embed": WEIGHTS["embed"]})
    assert name == "weights" and fingerprint_of(copied) == (name, found)
    renamed = {"embeds": WEIGHTS["embed"], "layers": WEIGHTS["layers"]}
    wider = jax.tree.map(lambda x: x.astype(jnp.float32), WEIGHTS)
    reshaped = WEIGHTS | {"embed": WEIGHTS["embed"].T}
    assert len({found, *(fingerprint_of(x)[1] for x in (renamed, wider, reshaped, "weights"))}) == 5
    for wrong in ({"q": "x"}, {"rng": jax.random.key(0)}, {}, None, ""):
        with pytest.raises(ValueError, match="^weights.*must be .* or .*a text"):
            fingerprint_of(wrong)
