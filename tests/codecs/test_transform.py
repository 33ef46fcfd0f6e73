"""Transform coding against a float64 oracle, and what its bases and bits promise."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, random_moments, softmax_attention
from transform_oracle import LAYOUT, SIZE, SPEC, basis_of, oracle, tokens_like, weighted

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.codecs.transform_bases import TransformBases, encode
from lowrank_kv_jax.estimators.bit_allocation import steps_of
from lowrank_kv_jax.estimators.moments import Sensitivity
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.method.accounting import full_cache_bytes
from lowrank_kv_jax.methods import Transform, machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.positions import Runs


@pytest.mark.parametrize("spec", [
    "bits=2", "bits=3.3,heads=per_head,rope=post", "bits_k=4,bits_v=1.5,metric=plain", "bits=1,rope=post",
    "bits=1.5,group=3", "bits=3,group=2,heads=per_head", "bits=2,group=2,rope=post,metric=plain", "kvtc,bits=2",
])
def test_attention_over_codes_equals_the_oracle(spec):
    """Steps folded into queries and values, means in closed form: what exact attention over rebuilt tokens gives."""
    method = parse_method(f"transform:{spec}")
    moments = random_moments(PLAIN, means=True, group=method.group or SPEC.num_layers)
    bases = method.fit(SPEC, moments)[0]
    layers = range(bases.layers)
    q, tokens = zip(*(tokens_like(moments, layer, layer) for layer in layers), strict=True)
    last = layers[-1]
    q, place = q[last], Place(index=last)
    counts = jnp.array([SIZE, 17])
    where = Runs(jnp.zeros((2, 2), jnp.int32), jnp.stack([jnp.full((2,), 4), jnp.zeros((2,))], 1).astype(jnp.int32))
    at = jnp.full((2, 3), 90)

    @jax.jit
    def through(bases, q, tokens):
        store = method.empty(LAYOUT, bases, SIZE)
        store = method.take_in(LAYOUT, bases, store, tokens, counts, counts, where)
        return store, method.attend(LAYOUT, bases, store, q, at, place), method.logits(LAYOUT, bases, store, q, place)

    store, part, votes = through(bases, q, tokens)
    assert store.tokens.k.codes.dtype == jnp.uint8
    k = oracle(bases, "k", [x.k_pre if method.rope == "pre" else x.k for x in tokens], store.tokens.k.runs)[last]
    if method.rope == "pre":
        k = np.asarray(rotate(jnp.asarray(k, jnp.float32), *(x[:, :, None] for x in rope_angles(SPEC.rope, tokens[0].positions))))
    v = oracle(bases, "v", [x.v for x in tokens], store.tokens.v.runs)[last]
    seen = np.broadcast_to(np.arange(SIZE) < np.asarray(counts)[:, None, None], (2, 3, SIZE))
    out, lse = softmax_attention(q, k, v, seen, SPEC.scale)
    np.testing.assert_allclose(part.lse, lse, atol=2e-4)
    np.testing.assert_allclose(part.out, out, atol=2e-3)
    keys = np.repeat(k, SPEC.group_size, axis=2)
    np.testing.assert_allclose(
        jnp.einsum("btnd,bnsd->btns", votes.q, jnp.repeat(votes.keys, SPEC.group_size, 1)),
        np.einsum("btnd,bsnd->btns", q, keys), atol=2e-3)


@pytest.mark.parametrize("spec", [pytest.param("bits=2,group=3", marks=pytest.mark.slow), "bits=2,heads=per_head,rope=post"])
def test_each_prompt_is_coded_around_its_own_mean(spec):
    """Tokens far from the calibration's: their mean, drawn by 32 tokens towards the calibrated one, is what is read around."""
    method = parse_method(f"transform:{spec}")
    moments = random_moments(PLAIN, means=True, group=method.group)
    bases = method.fit(SPEC, moments)[0]
    tokens = [tokens_like(moments, layer, layer)[1] for layer in range(bases.layers)]
    shift = jnp.asarray([3.0, 0.0])[:, None, None, None]
    tokens = tuple(x._replace(k=x.k + shift, k_pre=x.k_pre + shift, v=x.v + shift) for x in tokens)
    weight, counts = (jnp.arange(SIZE)[None] < jnp.asarray([[SIZE], [0]])).astype(jnp.float32), jnp.asarray([SIZE, SIZE])
    where = Runs(jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2), jnp.int32))
    errors = {}
    last = bases.layers - 1

    @functools.partial(jax.jit, static_argnums=0)
    def written(own, bases, tokens):
        store = own.learn(LAYOUT, bases, own.empty(LAYOUT, bases, SIZE), tokens, counts, weight)
        store = own.take_in(LAYOUT, bases, store, tokens, counts, counts, where)
        codes = [x.read_block(0, SIZE) for x in (store.tokens.k, store.tokens.v)]
        return store, own.decode(LAYOUT, bases, store, *codes, where, last)[1]

    for own in (method, dataclasses.replace(method, means="calibrated")):
        store, read = written(own, bases, tokens)
        errors[own.means] = np.mean((np.asarray(read).swapaxes(1, 2) - tokens[last].v) ** 2, axis=(1, 2, 3))
    assert store.k_mean is None and errors["prompt"][0] < 0.6 * errors["calibrated"][0]
    np.testing.assert_allclose(errors["prompt"][1], errors["calibrated"][1], rtol=1e-4)  # no token counted: the calibration's
    fitted = method.learn(LAYOUT, bases, method.empty(LAYOUT, bases, SIZE), tokens, counts, weight)
    for side, name in (("k", method.keys), ("v", "v")):
        own = np.stack([np.asarray(getattr(x, name)[0], np.float64).mean(0) for x in tokens])
        expected = (32 * np.asarray(getattr(bases, f"{side}_mean")) + SIZE * own) / (32 + SIZE)
        np.testing.assert_allclose(getattr(fitted, f"{side}_mean")[0], expected, atol=1e-5)


def test_more_bits_err_less_and_the_metric_favours_the_logits():
    moments = random_moments(PLAIN, means=True)
    errors = {}
    for metric in ("attention", "plain"):
        for bits in (1, 2, 4, 8):
            method = Transform(bits=float(bits), metric=metric)
            bases = method.fit(SPEC, moments)[0]
            _, tokens = tokens_like(moments, count=400)
            square = np.diagonal(moments.q_pre[0], axis1=1, axis2=2)
            d = oracle(bases, "k", [tokens.k_pre], bases.widths.rungs[0][0])[0] - np.asarray(tokens.k_pre, np.float64)
            e = oracle(bases, "v", [tokens.v], bases.widths.rungs[0][1])[0] - np.asarray(tokens.v, np.float64)
            errors[metric, bits] = np.mean(d**2 * square), np.mean(e**2) / np.var(np.asarray(tokens.v))
        for less, more in ((1, 2), (2, 4), (4, 8)):
            assert all(b < a for a, b in zip(errors[metric, less], errors[metric, more], strict=True))
        assert errors[metric, 8][1] < 2e-3
    # at equal bits of keys the weighted basis errs less in what queries see
    sides = [Transform(bits_k=2.0, bits_v=2.0, metric=m).fit(SPEC, moments)[0] for m in ("attention", "plain")]
    own = []
    for bases in sides:
        d = oracle(bases, "k", [tokens.k_pre], bases.widths.rungs[0][0])[0] - np.asarray(tokens.k_pre, np.float64)
        own.append(np.mean(d**2 * np.diagonal(moments.q_pre[0], axis1=1, axis2=2)))
    assert own[0] < own[1]


def test_bits_go_where_errors_raise_the_loss():
    moments = random_moments(PLAIN, means=True)
    known = moments.sensitivity
    side, layers = np.ones_like(known.v), SPEC.num_layers

    def widths(k, v):
        bases = Transform(bits=2.0).fit(SPEC, moments._replace(sensitivity=Sensitivity(k, k, v)))
        return np.array([[sum(bits * count for bits, count in runs) for runs in own.widths.rungs[0]] for own in bases])

    by_layer = side * np.array([100.0] + [1.0] * (layers - 1))[:, None, None]
    found = widths(by_layer, by_layer)
    assert (found[0] > found[1:]).all()
    found = widths(side, 100 * side)
    assert (found[:, 1] > found[:, 0]).all()
    # of two heads that are alike in everything else, the one that matters errs less
    weight = side * np.where(np.arange(SPEC.kv_heads) == 1, 100.0, 1.0)[:, None]
    bases = Transform(bits=2.0).fit(SPEC, moments._replace(sensitivity=Sensitivity(weight, weight, weight)))[0]
    _, tokens = tokens_like(moments, count=400)
    error = (oracle(bases, "v", [tokens.v], bases.widths.rungs[0][1])[0] - np.asarray(tokens.v, np.float64)) ** 2
    relative = error.mean((0, 1, 3)) / np.asarray(tokens.v, np.float64).var((0, 1)).mean(-1)
    assert relative[1] < 0.5 * np.delete(relative, 1).min()


@pytest.mark.parametrize("spec, coarse, share", [("bits=8", 0, 0.05), ("bits=3,group=3", 24, 0.12)])
def test_directions_in_few_bits_cost_codes_next_to_nothing(spec, coarse, share):
    """Coefficients are those of least squares in the rounded directions, where products with them are off by a hundredth
    of the largest one, and those of directions in 4 bits by more."""
    method, moments = parse_method(f"transform:{spec}"), random_moments(PLAIN, means=True, group=3)
    bases = method.fit(SPEC, moments)[0]
    runs, basis = bases.widths.rungs[0][1], basis_of(bases, "v")
    assert basis.shape[-1] - bases.v.shape[-1] >= coarse and (bases.v_coarse is None) == (coarse == 0)
    layers = [tokens_like(moments, layer, layer)[1].v for layer in range(bases.layers)]
    x = weighted(bases, "v", layers)[:, :, 0].reshape(-1, basis.shape[1])
    x += 100 * basis[0, :, 0]  # a component far above the others
    store = bases._replace(v_weight=None)
    codes = encode(store, ("v",), runs, [jnp.asarray(x, jnp.float32)[None, :, None]])[0, 0]
    codes *= bases.v_scale[0, : codes.shape[1]] * jnp.asarray(steps_of(runs))
    wanted = np.linalg.lstsq(basis[0], x.T, rcond=None)[0].T
    found, products = (np.abs(own - wanted).max() for own in (np.asarray(codes, np.float64), x @ basis[0]))
    assert found < share * products


def test_no_array_of_directions_is_empty():
    """Of white channels all components are coarse."""
    bases = white_bases(SPEC, parse_method("transform:bits=2,group=3,metric=plain,sampled=False"), "float32")[0]
    assert bases.v.shape[-1] == 1 and bases.rank("v") == basis_of(bases, "v").shape[-1] > 90


def test_units_that_all_layers_shared_are_read():
    method = parse_method("transform:bits=2,group=3")
    bases = method.fit(SPEC, random_moments(PLAIN, means=True, group=3))[0]._replace(k_coarse=None, v_coarse=None)
    arrays = bases.saved() | {f"{side}_unit": getattr(bases, f"{side}_unit")[:, 0] for side in "kv"}
    units = TransformBases.restored(arrays).v_unit
    assert units.shape == bases.v_unit.shape
    np.testing.assert_array_equal(units, np.broadcast_to(bases.v_unit[:, :1], units.shape))


def test_bytes_meet_what_is_asked_for():
    for spec in ("transform:smaller=5,sinks=2,recent=4", "transform:smaller=3,heads=per_head,sinks=2,recent=4",
                 "transform:smaller=6,group=2,sinks=2,recent=4", "transform:smaller=6,group=2,sinks=2,recent=4,steps=prompt",
                 "transform:smaller=6,kv=joint,sinks=2,recent=4", "transform:smaller=6,group=2,kv=joint,sinks=2,recent=4,steps=prompt"):
        method = parse_method(spec)
        bases = bases_for(method)
        assert len({group.widths for group in bases}) <= method.profiles  # layers of a profile share their programs
        layout = make_layout(PLAIN, 2, 256, 512, 4, jnp.bfloat16)
        cache = abstract_cache(method, layout, bases)
        ratio = full_cache_bytes(SPEC, 2 * 512) / lkv.cache_bytes(cache).total
        both = lkv.cache_bytes(cache, bases)
        assert both.smaller < both.smaller_apart == ratio and both.shared == sum(x.nbytes for x in jax.tree.leaves(bases))
        assert method.smaller * 0.985 <= ratio <= method.smaller * 1.25  # length, limit and pending belong to no layer
    for spec, said in (("transform:smaller=5", "smaller=5.0"), ("transform:smaller=9999,group=2", "smaller=9999.0")):
        method = parse_method(spec)
        with pytest.raises(ValueError, match=f"{said}: a prompt of 16 tokens .* is too short for it"):
            abstract_cache(method, make_layout(PLAIN, 2, 16, 48, 16), bases_for(method))


@pytest.mark.parametrize("spec", [
    "transform:bits=1.5", "transform:smaller=6,group=2", "transform:bits=none,metric=plain", "transform:smaller=6,group=2,kv=joint",
    "transform:bits=none,metric=plain,kv=joint",
])
def test_bases_come_back_from_disk_with_their_widths(spec, tmp_path):
    method, named = parse_method(spec), types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
    bases = bases_for(method)
    lkv.save_bases(tmp_path / "bases", bases, named, method)
    restored = lkv.load_bases(tmp_path / "bases", named, method)
    bases = tuple(own._replace(widths=dataclasses.replace(own.widths, fit="")) for own in bases)  # compared by `load_bases`
    chex.assert_trees_all_equal_structs(restored, bases)
    chex.assert_trees_all_equal(restored, bases)
    with pytest.raises(ValueError, match="do not serve"):
        lkv.load_bases(tmp_path / "bases", named, dataclasses.replace(method, heads="per_head"))
    with pytest.raises(ValueError, match="they have kv="):
        lkv.load_bases(tmp_path / "bases", named, dataclasses.replace(method, kv="apart" if method.kv == "joint" else "joint"))


@pytest.mark.parametrize("rope, kv, steps", [  # each of them once by default
    pytest.param(rope, *how, marks=[] if (rope, *how) in (
        ("pre", "apart", "calibrated"), ("tile", "joint", "calibrated"), ("post", "apart", "prompt")) else pytest.mark.slow)
    for rope in ("pre", "tile", "post") for how in (("apart", "calibrated"), ("apart", "prompt"), ("joint", "calibrated"))])
def test_no_float_copy_of_the_cache(rope, steps, kv):
    """What a step needs beside the cache does not grow with it."""
    method = Transform(rope=rope, steps=steps, kv=kv)
    bases, temporary = bases_for(method)[0], []
    for capacity in (1 << 14, 1 << 15):
        layout = dataclasses.replace(LAYOUT, capacity=capacity)
        store = jax.eval_shape(lambda size=capacity: method.empty(LAYOUT, bases, size))
        q, at = jax.ShapeDtypeStruct((2, 1, SPEC.q_heads, SPEC.head_dim), jnp.float32), jax.ShapeDtypeStruct((2, 1), jnp.int32)
        step = jax.jit(lambda store, q, at, layout=layout: method.attend(layout, bases, store, q, at, Place()))
        temporary.append(step.lower(store, q, at).compile().memory_analysis().temp_size_in_bytes)
    assert temporary[1] - temporary[0] < 4096


def test_errors_are_one_clear_line():
    for spec, said in (
        ("bits=9", "bits=9.0: must lie above 0 and be at most 8"), ("metric=mse", "metric='mse': allowed are loss, attention, plain"),
        ("bits=none,bits_k=2", "bits=None: give bits_k and bits_v"), ("profiles=0", "profiles=0: must be an int of at least 1"),
        ("smaller=0", "smaller=0.0: must be a positive number"), ("group=0", "group=0: must be an int of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_method(f"transform:{spec}")
    moments = random_moments(PLAIN)._replace(q_pre=None)
    with pytest.raises(ValueError, match=r"metric='attention': these moments hold no queries \(q_pre\)"):
        Transform(metric="attention").fit(SPEC, moments)
    with pytest.raises(ValueError, match="metric='loss': these moments hold no sensitivity"):
        Transform().fit(SPEC, moments._replace(sensitivity=None))
    assert Transform(metric="plain").fit(SPEC, moments)
    with pytest.raises(ValueError, match="group=4: the model has 3 layers"):
        Transform(group=4).validate(SPEC)
    with pytest.raises(ValueError, match="these moments hold no products of layers 0 to 1"):
        Transform(group=2).fit(SPEC, moments)
    machine, other = machine_of(Transform()), bases_for(Transform(heads="per_head"))
    with pytest.raises(ValueError, match="bases.k has 4 heads of width 8; .* takes 1 of 32"):
        machine.group_bases(SPEC, other)
    with pytest.raises(ValueError, match="bases of keys and values in one code: transform .* takes kv=apart; calibrate for it"):
        machine.group_bases(SPEC, bases_for(Transform(kv="joint")))
    with pytest.raises(ValueError, match="these moments hold no products of keys and values of layers 0 to 0"):
        Transform(kv="joint").fit(SPEC, moments._replace(keys_by_values=None))
    with pytest.raises(ValueError, match="bases with 0 sets of widths"):
        machine.group_bases(SPEC, bases_for(Transform(bits=None)))
    with pytest.raises(ValueError, match=r"bases with bits=\[6.0, 6.0\]: transform .* takes bits=\[2.0, 2.0\]; calibrate for it"):
        machine.group_bases(SPEC, bases_for(Transform(bits=6.0)))
    with pytest.raises(ValueError, match="bases with rope='tile': transform .* takes rope='pre'"):  # as many arrays, of one shape
        machine.group_bases(SPEC, bases_for(Transform(rope="tile")))


def test_layers_that_are_alike_share_their_bits():
    """At as many bits a group of layers errs less than the same layers each by itself; a smaller last group works too."""
    moments = random_moments(PLAIN, means=True, group=2)
    tokens = [tokens_like(moments, layer, 0, count=400)[1] for layer in range(2)]  # the same draw: they are correlated
    errors = []
    for group in (1, 2):
        found = Transform(bits=1.0, group=group, metric="plain").fit(SPEC, moments)
        assert [own.layers for own in found] == ([1] * 3 if group == 1 else [2, 1])
        pairs = [(found[0], tokens)] if group == 2 else [(own, [x]) for own, x in zip(found[:2], tokens, strict=True)]
        errors.append(sum(
            np.mean((read - np.asarray(x.v, np.float64)) ** 2)
            for own, layers in pairs
            for read, x in zip(oracle(own, "v", [x.v for x in layers], own.widths.rungs[0][1]), layers, strict=True)
        ))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("spec, backend", [
    pytest.param("bits=4,rope=post", "triton", marks=pytest.mark.slow),
    pytest.param("bits=4,rope=post,steps=prompt", "triton", marks=pytest.mark.slow),
    pytest.param("bits=4,kv=joint,rope=post", "triton", marks=pytest.mark.slow),
    ("bits=4", "triton"),
    pytest.param("bits=4,heads=per_head,kv=joint,steps=prompt", "triton", marks=pytest.mark.slow),
    pytest.param("bits=3", "tpu", marks=pytest.mark.slow),
    pytest.param("bits=2,rope=post,steps=prompt", "tpu", marks=pytest.mark.slow),
    *(pytest.param(f"bits=2,kv=joint{rope}", "tpu", marks=pytest.mark.slow) for rope in ("", ",rope=post")),
])
def test_kernels_give_what_xla_does(monkeypatch, spec, backend):
    """A warning, where one falls back to XLA, is an error. A GPU's kernels take queries in 16 bits."""
    method = parse_method(f"transform:{spec}")
    moments = random_moments(PLAIN, means=True)
    bases, (q, tokens) = method.fit(SPEC, moments)[0], tokens_like(moments)
    counts, weight = jnp.array([SIZE, 17]), jnp.ones((2, SIZE))
    where = Runs(jnp.zeros((2, 2), jnp.int32), jnp.full((2, 2), 2, jnp.int32))

    @jax.jit
    def store_of(bases, tokens):
        store = method.learn(LAYOUT, bases, method.empty(LAYOUT, bases, SIZE), (tokens,), counts, weight)
        return method.take_in(LAYOUT, bases, store, (tokens,), counts, counts, where)

    store, found, of = store_of(bases, tokens), {}, jnp.float16 if backend == "triton" else jnp.float32
    for chosen in ("xla", backend):
        monkeypatch.setenv("LOWRANK_KV_BACKEND", chosen)
        held = lay_out(store, "lanes") if chosen == "tpu" else store
        attend = jax.jit(lambda q, held=held: method.attend(LAYOUT, bases, held, q, jnp.full((2, 3), 90), Place()))
        found[chosen] = attend(q.astype(of))
    np.testing.assert_allclose(found[backend].lse, found["xla"].lse, atol=1e-2 if backend == "triton" else 2e-4)
    np.testing.assert_allclose(found[backend].out, found["xla"].out, atol=1e-2 if backend == "triton" else 2e-3)
