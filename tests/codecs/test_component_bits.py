"""Low-rank coefficients whose components have bits of their own: against tokens that are read back, and what bits promise."""

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, random_moments, softmax_attention
from transform_oracle import SIZE, SPEC, tokens_like

import lowrank_kv_jax as lkv
from lowrank_kv_jax.codecs.component_bits import typical_profile, typical_runs
from lowrank_kv_jax.estimators.bit_allocation import STEP, at_most, bits_of
from lowrank_kv_jax.estimators.row_steps import fitted_steps
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.method.accounting import full_cache_bytes
from lowrank_kv_jax.method.layout import layout_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.segments.coded import Coded, change_of_basis, moved_rows, transport
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import QuantisedTokens
from lowrank_kv_jax.storage.steps import Steps
from lowrank_kv_jax.storage.water_filled import WaterFilled, bytes_of, components_of

LAYOUT = layout_of(SPEC, 2, SIZE, 160, dtype="float32")
NO_GAPS = Runs(jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2), jnp.int32))
BOTH = jnp.ones((2, SIZE))


def stored(method, bases, tokens, weight=BOTH):
    """A prompt's tokens of one layer, coded."""
    @jax.jit
    def through(bases, tokens, weight):
        counts, size = jnp.full((2,), tokens.k.shape[1]), tokens.k.shape[1]
        store = method.empty(LAYOUT, bases, size)
        store = method.learn(LAYOUT, bases, store, (tokens._replace(positions=None),), counts, weight)
        return method.take_in(LAYOUT, bases, store, (tokens,), counts, counts, NO_GAPS)

    return through(bases, tokens, weight)


def rebuilt(method, bases, store):
    """Keys after RoPE and values `[B, T, K, D]`."""
    codes = (x.read_block(0, x.shape[2]) for x in (store.tokens.k, store.tokens.v))
    return [np.asarray(x).swapaxes(1, 2) for x in method.decode(LAYOUT, bases, store, *codes, NO_GAPS, 0)]


@pytest.mark.parametrize("spec", [
    "static-pca:rank=0.8,bits=2.5",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "ojakv:rank=0.6,bits=3.3", "ojakv:rank=1.0,bits=3,rope=pre", "eigenattention:bits=3", "palu:rank=0.6,bits=2.25,mean=true",
        "streamingkv:rank=0.6,bits=3.3", "streamingkv:form=encoder,bits=3", "static-pca-h:heads=joint,bits=1",
        "ojakv:order=reconstruct,bits=5",
    )),
])
def test_codes_are_the_middles_of_the_steps_and_are_attended_as_they_are_read(spec):
    method, moments = parse_method(spec), random_moments(PLAIN, means=True)
    bases = method.fit(SPEC, moments)[0]
    q, tokens = tokens_like(moments)
    store = stored(method, bases, tokens)
    frame = method.frame(SPEC, bases, store)
    for side, x in zip("kv", frame.code(*method.sides(tokens)), strict=True):
        held, steps = getattr(store.tokens, side), getattr(store, f"{side}_steps")
        assert isinstance(held, WaterFilled) and held.runs == bases.widths.rungs[0]["kv".index(side)]
        counts = (np.asarray(x, np.float64) - np.asarray(steps.zero)[:, :, None]) / np.asarray(steps.step)[:, :, None]
        half = np.concatenate([np.full(count, 2.0 ** (bits - 1)) for bits, count in held.runs])
        expected = np.clip(np.floor(counts), -half, half - 1) + 0.5
        assert np.mean(np.asarray(held.read_block(0, SIZE)) == expected) > 0.999  # but for rounding at an edge
    k, v = rebuilt(method, bases, store)
    at = jnp.full((2, 3), SIZE + 10)
    part = jax.jit(lambda: method.attend(LAYOUT, bases, store, q, at, Place()))()
    out, lse = softmax_attention(q, k, v, np.ones((2, 3, SIZE), bool), SPEC.scale)
    np.testing.assert_allclose(part.lse, lse, atol=1e-3)
    np.testing.assert_allclose(part.out, out, atol=4e-3)
    votes = method.logits(LAYOUT, bases, store, q, Place())
    keys = jnp.repeat(votes.keys, SPEC.group_size, axis=1)
    np.testing.assert_allclose(jnp.einsum("btnd,bnsd->btns", votes.q, keys),
                               np.einsum("btnd,bsnd->btns", q, np.repeat(k, SPEC.group_size, axis=2)), atol=4e-3)


def test_more_bits_err_less_and_take_no_more_than_asked_for():
    moments, errors = random_moments(PLAIN, means=True), []
    _, tokens = tokens_like(moments, count=SIZE)
    for bits in (1.25, 3.0, 7.5):
        method = parse_method(f"static-pca:rank=1.0,rope=pre,bits={bits}")
        fitted = method.fit(SPEC, moments)
        assert sum(map(bits_of, (b.widths.rungs[0] for b in fitted))) <= bits * 2 * SPEC.head_dim * SPEC.num_layers
        read = method.rebuilt(LAYOUT, fitted[0], stored(method, fitted[0], tokens))
        errors.append([float(np.mean((np.asarray(x).swapaxes(1, 2) - np.asarray(true)) ** 2))
                       for x, true in zip(read, (tokens.k_pre, tokens.v), strict=True)])
    assert all(b < a for less, more in zip(errors, errors[1:], strict=False) for a, b in zip(less, more, strict=True))


def test_widths_and_steps_are_by_variance_and_by_prompt():
    """Components lie by falling errors; a row without tokens has the calibrated steps, of another the zeros follow it."""
    method, moments = parse_method("static-pca:rank=1.0,bits=2.5"), random_moments(PLAIN, means=True)
    bases = method.fit(SPEC, moments)[0]
    assert np.diff(np.asarray(bases.v_scale, float), axis=-1).max() <= 1e-6
    _, tokens = tokens_like(moments)
    shifted = tokens._replace(v=tokens.v + 5.0)
    store = stored(method, bases, shifted, BOTH.at[1].set(0))
    runs = bases.widths.rungs[0][1]
    step = np.asarray(bases.v_scale) * np.concatenate([np.full(count, STEP[bits]) for bits, count in runs])
    np.testing.assert_allclose(store.v_steps.step[1], step, rtol=1e-6)
    np.testing.assert_allclose(store.v_steps.zero[1], bases.v_zero, rtol=1e-5, atol=1e-6)
    moved = np.asarray(store.v_steps.zero[0] - bases.v_zero)
    own = np.einsum("btkd,kdr->kr", np.asarray(shifted.v)[:1], np.asarray(bases.v)) / SIZE - np.asarray(bases.v_zero)
    np.testing.assert_allclose(moved, own * SIZE / (SIZE + 32), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_steps_of_narrow_caches_are_above_zero(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, SIZE, 12)) * 1e-4, jnp.float32)
    steps = fitted_steps(x, BOTH, ((4, 4), (1, 8)), jnp.dtype(dtype))
    assert steps.step.dtype == dtype and (np.asarray(steps.step, np.float32) > 0).all()


def test_uniform_bits_and_bases_without_widths_stay_as_they_were():
    for spec in ("ojakv", "palu", "streamingkv", "static-pca"):
        plain, uniform, own = (parse_method(spec + bits) for bits in ("", ":bits=2", ":bits=2.5"))
        assert plain.fit_key(SPEC) == uniform.fit_key(SPEC) != own.fit_key(SPEC)
        store = jax.eval_shape(lambda m=uniform: m.empty(LAYOUT, bases_for(m)[0], SIZE))
        assert isinstance(store.tokens.k, QuantisedTokens) and store.k_steps is None
        for method, bases in ((own, bases_for(uniform)), (uniform, bases_for(own))):
            with pytest.raises(ValueError, match="calibrate for it"):
                method.check_bases(SPEC, bases[0])


def test_bytes_foretell_less_than_uniform_bits_take():
    """Equal bits of coefficients; what follows the prompt are two numbers a component and row, not for every 128 tokens."""
    layout = layout_of(SPEC, 2, 384, 512)
    for spec in ("ojakv", "xkv"):
        sizes = [lkv.cache_bytes(abstract_cache(m, layout, bases_for(m)))
                 for m in (parse_method(f"{spec}:rank=1.0,bits={bits}") for bits in (2, 2.0001, 4, 4.25))]
        assert sizes[1].by_kind["coefficients"] <= 1.1 * sizes[0].by_kind["coefficients"]  # whole bytes of a tiny head
        assert sizes[1].by_kind["scales"] < 0.6 * sizes[0].by_kind["scales"]
        assert sizes[2].full == full_cache_bytes(SPEC, 2 * 512)


def test_codes_move_with_their_basis_and_those_of_a_row_at_rest_do_not():
    rng, runs = np.random.default_rng(0), ((8, 2), (4, 4))
    old = np.linalg.qr(rng.normal(size=(2, 3, 8, 6)))[0]
    new = np.linalg.qr(old + 0.01 * rng.normal(size=old.shape))[0]
    new *= np.sign(np.sum(new * old, axis=2, keepdims=True))
    new[1] = old[1]
    scale, zero = np.array([4.0, 3, 2, 1.5, 1, 0.5]), np.linspace(-2, 3, 6)
    step = scale * np.concatenate([np.full(count, STEP[bits]) for bits, count in runs])
    x = rng.normal(size=(2, 3, SIZE, 6)) * scale + zero

    @jax.jit
    def transported(old, new, steps, x):
        codes = jnp.zeros((2, 3, SIZE, bytes_of(runs)), jnp.uint8)
        held = WaterFilled(codes, runs).filled(steps.count(x))
        segment = Coded(held, held, jnp.full((2,), SIZE), NO_GAPS)
        move = change_of_basis(old, new)
        after = steps.moved(move, moved_rows(segment, old, new))
        moved = transport(segment, "k", old, new, steps, after)
        expected = jnp.einsum("bjsr,bjrp->bjsp", steps.widen(held.read_block(0, SIZE)), move)
        return held, moved, after, after.widen(moved.read_block(0, SIZE)) - expected

    steps = Steps(*(jnp.asarray(np.broadcast_to(own, (2, 3, 6)), jnp.float32) for own in (step, zero)))
    held, moved, after, error = transported(*(jnp.asarray(a, jnp.float32) for a in (old, new)), steps, jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(moved.codes[1], held.codes[1])
    np.testing.assert_array_equal(after.zero[1], steps.zero[1])
    assert (np.asarray(moved.codes[0]) != np.asarray(held.codes[0])).any() and (np.asarray(after.zero - steps.zero)[0] != 0).all()
    inside = np.abs(np.asarray(error)[0]) <= step * (0.5 + 1e-4)
    assert inside[..., :2].all() and inside.mean() > 0.98  # but for what the range cuts off


def test_bases_are_saved_with_their_widths(tmp_path):
    model = types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
    method = parse_method("palu:bits=2.25,mean=true")
    bases = method.fit(SPEC, random_moments(PLAIN, means=True))
    save_bases(tmp_path / "bases", bases, model, method)
    chex.assert_trees_all_equal(load_bases(tmp_path / "bases", model, method), bases)
    with pytest.raises(ValueError, match="bits=2.25"):
        load_bases(tmp_path / "bases", model, dataclasses.replace(method, bits=3.5))


def test_widths_of_bases_fitted_to_prompts_are_within_their_bits():
    for k, v, bits in ((152, 232, 2.25), (38, 58, 4.25), (12, 12, 1), (5, 7, 2.5), (64, 8, 6)):
        profile = typical_profile(k, v, bits)
        assert bits * (k + v) - 32 <= bits_of(profile) <= bits * (k + v)
        assert components_of(profile[0]) <= k and components_of(profile[1]) <= v
        assert bits * k - 40 <= 8 * bytes_of(typical_runs(k, bits)) <= bits * k  # whole words
    assert at_most(((8, 2), (4, 3), (1, 8)), 4) == ((8, 2), (4, 2))
