"""Taps of any decoder, summed: what comes out is NumPy's, and what taps cannot give is told at once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN
from suites import Loaded

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.calibration.calibrate import moments_for
from lowrank_kv_jax.calibration.corpus import token_windows
from lowrank_kv_jax.calibration.layer_votes import EDGES
from lowrank_kv_jax.generation.forward import read_layer, start_reading

SPEC, LENGTH, COUNTS = PLAIN.attention, 24, (24, 17)
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # half-split, of pairs of neighbours


def layers(spec=SPEC, seed=0):
    """Taps of each layer of two rows."""
    rng, at = np.random.default_rng(seed), jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    shape = (2, LENGTH, spec.kv_heads, spec.head_dim)
    for _ in range(spec.num_layers):
        q = rng.normal(size=(2, LENGTH, spec.q_heads, spec.head_dim))
        k, v = rng.normal(size=shape) * np.linspace(2, 0.1, spec.head_dim), rng.normal(size=shape)
        yield lkv.rotary_taps(spec, *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), at)


def counted(x):
    """The tokens that count, one row `[W]` a token, float64."""
    return np.concatenate([np.asarray(x[row, :n], np.float64).reshape(n, -1) for row, n in enumerate(COUNTS)])


def summed(spec=SPEC, *methods):
    calibrator = lkv.Calibrator(spec, *methods)
    for seed in (0, 1):
        calibrator.add(layers(spec, seed), np.asarray(COUNTS))
    return calibrator


def test_padding_does_not_count_and_layers_are_taken_together():
    moments = summed(SPEC, "transform:metric=plain,group=2,sampled=False").moments()
    texts = [list(layers(seed=seed)) for seed in (0, 1)]
    assert moments.tokens == 2 * sum(COUNTS) and list(moments.across) == [(0, 1)]
    for name in ("k", "k_pre", "v"):
        tokens = [[counted(getattr(one, name)) for one in text] for text in texts]
        want = sum(x.T @ x for x, *_ in tokens)
        np.testing.assert_allclose(getattr(moments, name)[0], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(getattr(moments, f"{name}_sum")[2], sum(x.sum(0) for *_, x in tokens), atol=1e-3)
        pairs = [np.concatenate(text[:2], axis=1) for text in tokens]
        np.testing.assert_allclose(moments.between(name, (0, 1)), sum(x.T @ x for x in pairs), rtol=1e-4, atol=1e-4)
    q = sum(np.einsum("tkgd,tkge->kde", x, x) for x in (counted(text[1].q).reshape(-1, 4, 2, 8) for text in texts))
    np.testing.assert_allclose(moments.q[1], q, rtol=1e-4, atol=1e-4)


def test_deviations_beside_large_means_keep_their_digits_and_padding_may_be_nan():
    """As keys with biases have them: products of the tokens themselves leave float32 none of the small deviations."""
    rng, spec = np.random.default_rng(0), dataclasses.replace(SPEC, num_layers=2, windows=(None, None))
    deviations = np.geomspace(1, 0.01, spec.head_dim * spec.kv_heads).reshape(spec.kv_heads, -1)
    texts = [[300 + rng.normal(size=(2, LENGTH, spec.kv_heads, spec.head_dim)) * deviations for _ in range(2)] for _ in range(2)]
    calibrator = lkv.Calibrator(spec, groups=[(0, 1)], by_values=[(0, 1)])
    valid = np.arange(LENGTH)[:, None, None] < np.asarray(COUNTS)[:, None, None, None]
    for text in texts:
        kv = [jnp.asarray(np.where(valid, x, np.nan), jnp.float32) for x in text]
        q = jnp.where(valid, jnp.ones((2, LENGTH, spec.q_heads, spec.head_dim)), jnp.nan)
        calibrator.add([Taps(q, x, x, x, None) for x in kv], np.asarray(COUNTS))
    moments = calibrator.moments()
    tokens = np.concatenate([np.concatenate([counted(jnp.asarray(x, jnp.float32)) for x in text], axis=1) for text in texts])
    wanted = np.cov(tokens.T, bias=True)
    mean = moments.mean("k").ravel()
    for sums in (moments.between("k", (0, 1)), moments.by_values("k_pre", (0, 1))):
        np.testing.assert_allclose(sums / moments.tokens - np.outer(mean, mean), wanted, rtol=1e-3, atol=1e-8)
    np.testing.assert_allclose(moments.k[1], moments.between("k", (0, 1))[32:, 32:], rtol=1e-12)


def test_bases_are_the_methods_and_of_half_split_channels():
    interleaved = dataclasses.replace(SPEC, rope=dataclasses.replace(SPEC.rope, interleaved=True))
    calibrator = summed(interleaved, "static-pca:rank=3,rope=pre")
    x = np.concatenate([counted(list(layers(interleaved, seed))[1].k_pre) for seed in (0, 1)])[:, :8][:, ORDER]
    np.testing.assert_allclose(calibrator.moments().per_head("k_pre", 4)[1, 0], x.T @ x, rtol=1e-4, atol=1e-4)
    q = np.concatenate([counted(list(layers(interleaved, seed))[1].q).reshape(-1, 4, 2, 8) for seed in (0, 1)])
    q = q[:, 0][..., ORDER].reshape(-1, 8)
    np.testing.assert_allclose(calibrator.moments().q[1, 0], q.T @ q, rtol=1e-4, atol=1e-4)
    bases = calibrator.bases("static-pca:rank=3,rope=pre", jnp.float32)
    assert len(bases) == SPEC.num_layers and bases[0].k.shape == (4, 8, 3)
    v = np.concatenate([counted(list(layers(interleaved, seed))[1].v) for seed in (0, 1)])[:, :8]
    want = np.linalg.eigh(v.T @ v)[1][:, ::-1][:, :3]
    np.testing.assert_allclose(np.abs(np.sum(want * np.asarray(bases[1].v[0]), axis=0)), 1.0, atol=1e-4)
    assert bases[0].k.dtype == jnp.float32 and summed().bases("ojakv:rank=4")[0].k.dtype == jnp.bfloat16
    assert summed().bases("snapkv:keep=0.5") == (None,) * 3


@pytest.mark.parametrize("method, message", [
    ("palu:rank_by=fisher", "palu: its bases read 'fisher' .gradients by the projections.*; give rank_by=uniform"),
    ("transform", "transform: its bases read 'sampled' .*'sensitivity'.*; give sampled=False,metric=attention"),
    ("ojakv:rank=33", "rank=33"),
])
def test_what_taps_do_not_show_is_told_before_any_text(method, message):
    with pytest.raises(ValueError, match=message):
        lkv.Calibrator(SPEC, method)
    with pytest.raises(ValueError, match=message):
        summed().bases(method)


def test_the_ways_out_are_enough():
    for name, cls in lkv.methods.REGISTRY.items():
        lkv.Calibrator(SPEC, f"{name}:{','.join(cls.without.values())}".rstrip(":"))


def test_taps_that_do_not_fit_are_refused_and_not_summed():
    calibrator = summed()
    before = calibrator.moments()
    with pytest.raises(ValueError, match="taps of 2 layers: this decoder has num_layers=3"):
        calibrator.add(list(layers())[:2])
    broken = [one._replace(v=one.v.at[0, 3].set(jnp.nan)) for one in layers()]
    with pytest.raises(ValueError, match="tap 'v' in layer 0 are not finite"):
        calibrator.add(broken)
    np.testing.assert_array_equal(calibrator.moments().v, before.v)
    with pytest.raises(ValueError, match="no text was added"):
        lkv.Calibrator(SPEC).bases("ojakv:rank=4")
    with pytest.raises(ValueError, match="these moments hold no products of layers 0 to 1"):
        calibrator.bases("transform:metric=plain,group=2,sampled=False")


# ---- votes of a second reading --------------------------------------------------------------------------------------


def read_twice(model, window):
    """Taps of each layer of one of the library's models, as a decoder of one's own would show them."""
    reading = start_reading(model.config, model.params, jnp.asarray(window[None]), jnp.asarray([len(window)]), twice=True)
    for layer in range(model.config.num_layers):
        reading, taps = read_layer(model.config, model.params, layer, reading)
        yield taps


def test_votes_are_those_of_the_librarys_own_calibration():
    model, method, text = Loaded(), lkv.parse_method("kivi:bits=4+kvzip:keep=0.25"), "the quick brown fox jumps; " * 20
    windows = token_windows(model.tokenizer, [text], 40, 3, 0)
    calibrator = lkv.Calibrator(SPEC, method)
    for window in windows:
        calibrator.add(read_twice(model, window))
    own = moments_for(model, [method], windows).votes
    np.testing.assert_array_equal(calibrator.moments().votes, own)
    assert not (own[0] == own[1]).all()  # layers differ in what they look at
    assert calibrator.bases(method) == lkv.calibrate(model, method, [text], length=40, windows=3)


def voted(seed=0):
    votes = np.random.default_rng(seed).random((3, 2, SPEC.kv_heads, LENGTH), np.float32) ** 8
    return votes, [one._replace(reread=jnp.asarray(own)) for one, own in zip(layers(), votes, strict=True)]


def test_votes_for_sinks_and_padding_do_not_count():
    calibrator, both = lkv.Calibrator(SPEC, "kvzip:keep=0.25"), [voted(seed) for seed in (0, 1)]
    for _, taps in both:
        calibrator.add(taps, np.asarray(COUNTS))
    for layer, found in enumerate(calibrator.moments().votes):
        own = np.concatenate([votes[layer, row, :, 4:n].ravel() for votes, _ in both for row, n in enumerate(COUNTS)])
        np.testing.assert_allclose(found, [(own > edge).mean() for edge in EDGES], atol=1e-12)
    assert len(calibrator.bases("kvzip:keep=0.25")) == SPEC.num_layers


def test_votes_that_are_missing_are_told():
    calibrator, (votes, taps) = lkv.Calibrator(SPEC, "kivi:bits=4+kvzip:keep=0.25"), voted()
    last = lambda reread: [*taps[:2], taps[2]._replace(reread=reread)]  # noqa: E731
    for given, message in (
        (layers(), r"taps.reread=None: kvzip reads .*\(prompt_twice, attend_twice\), or give layers=uniform"),
        (last(None), "taps.reread: 2 layers have it, and the decoder has 3"),
        (last(jnp.ones((2, 8, LENGTH))), r"layer 2: must be \(2, 4, 24\) .* without their copies, and is \(2, 8, 24\)"),
        (last(jnp.asarray(votes[2] * np.nan)), "the votes of layer 2 are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrator.add(given)
    with pytest.raises(ValueError, match="no text was added"):
        calibrator.moments()
    with pytest.raises(ValueError, match="kvzip: the moments hold no votes of a second reading"):
        summed().bases("kvzip:keep=0.25")
