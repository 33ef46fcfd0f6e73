"""Bases refined by gradient on the outputs of attention."""

import dataclasses
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from helpers import PLAIN, attend, compress, model, prompts

from lowrank_kv_jax.calibration import refine as refining
from lowrank_kv_jax.calibration.calibrate import calibrate, fit_bases, moments_for
from lowrank_kv_jax.calibration.coded_attention import groups_of, output_error
from lowrank_kv_jax.calibration.corpus import token_windows
from lowrank_kv_jax.calibration.refine import refine, retracted
from lowrank_kv_jax.calibration.taps import iterate_taps
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.load import LoadedModel

TOKENS = np.asarray(prompts(3, 96, seed=3))
ONE = "transform:bits=1,profiles=1,metric=attention,sampled=False"


@functools.cache
def fitted(spec, dtype="float32"):
    method = parse_method(spec)
    return method, fit_bases(model(), method, moments_for(model(), [method], TOKENS), dtype)


def errors(method, bases, seed=0):
    """Of each group, the mean over texts."""
    return np.array([
        np.mean([output_error(group.kind, own, seen.of_text(i)) for i in range(len(TOKENS))])
        for (group, seen), own in zip(groups_of(model(), method, TOKENS, seed), bases, strict=True)
    ])


@pytest.mark.parametrize("spec", [
    pytest.param(ONE, marks=pytest.mark.slow),
    "transform:bits=2,group=3,heads=per_head,rope=post,means=calibrated,sampled=False",
    pytest.param(f"{ONE},group=2,kv=joint", marks=pytest.mark.slow),
    pytest.param(f"{ONE},rope=tile", marks=pytest.mark.slow),
    pytest.param(f"{ONE},group=2,kv=joint,rope=post", marks=pytest.mark.slow),
])
def test_the_error_falls_and_directions_stay_orthonormal(spec, monkeypatch):
    method, bases = fitted(spec, "bfloat16")
    directions = []

    def seen(side, basis, *rest, original=refining.stored):
        directions.append(basis)
        return original(side, basis, *rest)

    monkeypatch.setattr(refining, "stored", seen)
    refined = refine(model(), method, bases, TOKENS, 48)
    chex.assert_trees_all_equal_structs(refined, bases)
    chex.assert_trees_all_equal_shapes_and_dtypes(refined, bases)
    before, after = errors(method, bases), errors(method, refined)
    assert after.mean() < 0.96 * before.mean(), (before, after)
    assert len(directions) == 2 * len(bases)
    if method.kv == "joint":  # keys above values
        directions = [np.concatenate(halves, axis=1) for halves in zip(directions[::2], directions[1::2], strict=True)]
    for basis in directions:
        basis = basis[..., np.abs(basis).max((0, 1)) > 0]
        eye = np.broadcast_to(np.eye(basis.shape[-1]), (len(basis), *2 * basis.shape[-1:]))
        np.testing.assert_allclose(basis.swapaxes(1, 2) @ basis, eye, atol=1e-5)


def test_the_error_is_that_of_the_cache():
    """Of the last query of a text: what the machine attends to, with its own ends, codes and means."""
    method, bases = fitted("transform:bits=2,metric=plain,sampled=False,recent_bits=none")
    layout_of_groups = ((dataclasses.replace(group.layout, dtype="float32"), group, seen)
                        for group, seen in groups_of(model(), method, TOKENS[:1]))
    layout, group, seen = next(itertools.islice(layout_of_groups, 1, None))
    taps = list(itertools.islice(iterate_taps(PLAIN, model().params, jnp.asarray(TOKENS[:1])), 2))[1]
    last = jnp.asarray([[TOKENS.shape[1] - 1]])
    seen = seen._replace(taps=(seen.taps[0]._replace(q=taps.q[:, -1:]),), at=last)
    machine, lengths = machine_of(method), jnp.asarray([TOKENS.shape[1]])
    own = machine.group_bases(PLAIN.attention, bases)[1]
    state = compress(machine, layout, own, (taps._replace(x=None),), lengths)
    found = attend(machine, layout, own, state, taps.q[:, -1:], last).out
    k, v = (np.repeat(np.asarray(x[0], np.float64), PLAIN.attention.group_size, axis=1) for x in (taps.k, taps.v))
    p = jax.nn.softmax(np.einsum("nd,snd->ns", taps.q[0, -1], k) * PLAIN.attention.scale)
    wanted = np.einsum("ns,snd->nd", p, v).reshape(-1)
    outward = np.asarray(model().params["layers"][1]["attention"]["o_proj"]["kernel"], np.float64)
    squares = [np.sum((x @ outward) ** 2) for x in (np.asarray(found, np.float64).reshape(-1) - wanted, wanted)]
    error = output_error(dataclasses.replace(group, layout=layout), bases[1], seen)
    np.testing.assert_allclose(error, squares[0] / squares[1], rtol=1e-3)
    assert error > 1e-5


def test_no_steps_change_nothing_and_a_seed_decides_all():
    method, bases = fitted(ONE)
    assert refine(model(), method, bases, TOKENS, 0) is bases
    first, again, other = (refine(model(), method, bases, TOKENS, 3, seed=seed) for seed in (1, 1, 2))
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(first[0].k_scale, other[0].k_scale)


def test_parts_are_learnt_alone():
    method, bases = fitted(ONE)
    steps = refine(model(), method, bases, TOKENS, 3, learn=["steps"])
    directions = refine(model(), method, bases, TOKENS, 3, learn=["bases"])
    for old, own, other in zip(bases, steps, directions, strict=True):
        chex.assert_trees_all_equal(own._replace(k_scale=old.k_scale, v_scale=old.v_scale), old)
        assert not np.allclose(own.k_scale, old.k_scale, rtol=1e-4) and not np.allclose(own.v_scale, old.v_scale, rtol=1e-4)
        assert not np.array_equal(other.k, old.k) and not np.array_equal(other.v_mean, old.v_mean)
        np.testing.assert_array_equal(other.k_scale, old.k_scale)


def test_retraction_turns_no_column_round():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(2, 12, 7)))[0].astype(np.float32)
    np.testing.assert_allclose(retracted(jnp.asarray(basis)), basis, atol=1e-6)
    moved = retracted(jnp.asarray(basis + 1e-2 * rng.normal(size=basis.shape).astype(np.float32)))
    np.testing.assert_allclose(moved.swapaxes(1, 2) @ moved, np.broadcast_to(np.eye(7), (2, 7, 7)), atol=1e-6)
    assert (np.sum(moved * basis, axis=1) > 0.99).all()


def test_calibrate_refines_what_it_fits():
    loaded = LoadedModel("tiny", PLAIN, model().params, Characters(), "a" * 64)
    text, method = "the quick brown fox jumps over the lazy dog; " * 20, parse_method(ONE)
    common = {"length": 64, "windows": 2, "seed": 5, "dtype": "float32"}
    found = calibrate(loaded, method, [text], **common, refine=2)
    tokens = token_windows(Characters(), [text], 64, 2, 5)
    chex.assert_trees_all_equal(found, refine(loaded, method, calibrate(loaded, method, [text], **common), tokens, 2, seed=5))


def test_a_selection_before_the_codec_keeps_its_shares():
    spec = f"{ONE}+kvzip:keep=0.5"
    method, bases = fitted(spec)
    refined = refine(model(), method, bases, TOKENS, 1, learn=["steps"])
    chex.assert_trees_all_equal(refined[0].selection, bases[0].selection)
    assert not np.array_equal(refined[0].codec.k_scale, bases[0].codec.k_scale)


@pytest.mark.parametrize("spec, words", [
    ("ojakv:rank=4", "refine: method 'ojakv' has no bases that can be refined; methods that have: transform"),
    ("kivi:bits=4+kvzip:keep=0.5", "method 'kivi+kvzip' has no bases"),
    ("transform:smaller=8", "refine: smaller=8.0 leaves the widths to each prompt's length; give bits= instead"),
    ("transform:bits=none", "refine: bits=None rounds nothing; give bits="),
])
def test_methods_without_such_bases_are_refused_before_the_model_runs(spec, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        calibrate(model(), spec, ["text"], refine=1)
    with pytest.raises(ValueError, match=re.escape(words)):
        refine(model(), parse_method(spec), (), TOKENS, 1)


@pytest.mark.parametrize("change, words", [
    ({"steps": -1}, "steps=-1: must be at least 0"),
    ({"steps": 10**7}, "steps=10000000: must be at most 1000000"),
    ({"steps": 1.5}, "steps=1.5: must be an int"),
    ({"learn": ["means"]}, "learn=('means',): must name some of steps, bases"),
    ({"learn": []}, "learn=(): must name some of"),
    ({"tokens": TOKENS[:, :12]}, "windows of 12 tokens: the first 4 and last 24 are exact"),
    ({"tokens": TOKENS + 64}, "the vocabulary has 64"),
    ({"bases": ()}, "bases hold 0 groups"),
])
def test_bad_arguments(change, words):
    method, bases = fitted(ONE)
    with pytest.raises(ValueError, match=re.escape(words)):
        refine(model(), method, **{"bases": bases, "tokens": TOKENS, "steps": 1} | change)


def test_what_is_not_finite_names_its_layers():
    method, bases = fitted(ONE)
    broken = (bases[0], bases[1]._replace(v_scale=bases[1].v_scale * jnp.nan), bases[2])
    with pytest.raises(ValueError, match="what layers 1 to 1 learnt is not finite"):
        refine(model(), method, broken, TOKENS, 1)
