"""OjaKV's moving bases: what is stored anchors them, prompts teach them by queries too, salience keeps to the window."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, WINDOWED, bases_for, model, prompts
from jax.extend.core import jaxprs_in_params

from lowrank_kv_jax.attention.importance import window_attention
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import extend, make_layout, prefill, refresh
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.segments.coded import Coded, stored_moment, transport
from lowrank_kv_jax.storage.packed import empty_packed, hold_packed
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import read_tokens, store_tokens
from lowrank_kv_jax.storage.steps import Steps
from lowrank_kv_jax.storage.water_filled import empty_water_filled

RNG = np.random.default_rng(0)
ENDS = "sinks=4,recent=8"
OLD = "normalize_dec=largest"


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


# ---- the second moment of what is stored


moment = jax.jit(stored_moment, static_argnums=1)


@pytest.mark.parametrize("size", [7, 700])
@pytest.mark.parametrize("bits", [None, 8])
def test_the_moment_of_stored_tokens_counts_each_rows_own(size, bits):
    lengths, gaps = jnp.array([size, size // 3, 0]), jnp.zeros((3, 2), jnp.int32)
    stored = store_tokens(normal(3, 2, size, 4), bits, jnp.float32)
    found = moment(Coded(stored, stored, lengths, Runs(gaps, gaps)), "k")
    x = np.asarray(read_tokens(stored), np.float64)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(found[row], np.einsum("jsr,jsp->jrp", x[row, :, :n], x[row, :, :n]), atol=2e-3)


@pytest.mark.parametrize("turn", [2**26, 2**12], ids=["at once", "in turns"])
def test_an_accelerator_multiplies_16_bits_as_they_are_stored(monkeypatch, turn):
    """Sums and moved coefficients are those of a CPU, which widens them block by block."""
    lengths, gaps = jnp.array([1500, 700]), jnp.zeros((2, 2), jnp.int32)
    stored = normal(2, 2, 1500, 4).astype(jnp.bfloat16)
    segment = Coded(stored, stored, lengths, Runs(gaps, gaps))
    bases = normal(2, 2, 8, 4), normal(2, 2, 8, 4)
    old, new = (jnp.linalg.qr(bases[0] + share * bases[1])[0] for share in (0.0, 0.1))

    def both(segment):
        return stored_moment(segment, "k"), transport(segment, "k", old, new)

    wanted = jax.jit(both)(segment)
    for module in ("storage.block_reads", "segments.coded"):
        monkeypatch.setattr(f"lowrank_kv_jax.{module}.platform", lambda: "gpu")
    monkeypatch.setattr("lowrank_kv_jax.storage.block_reads.AT_ONCE", turn)
    monkeypatch.setattr("lowrank_kv_jax.storage.block_reads.A_TURN", turn)
    found = jax.jit(lambda x: both(x))(segment)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(*(np.asarray(x[1], np.float32) for x in (found, wanted)), rtol=2**-7, atol=2**-8)


def test_the_moment_of_packed_tokens_is_each_heads_own():
    owner = jnp.asarray(np.repeat([0, 1, 2], [5, 2, 3])[None, None], jnp.int8)
    where, x, lengths = PerHead(jnp.zeros((1, 1, 10), jnp.int32), owner, 3), normal(1, 1, 10, 4), jnp.array([9])
    for stored in (x, jax.jit(hold_packed)(empty_packed(1, 3, 10, 4, 8, 4), x, owner, lengths)):
        found = moment(Coded(stored, stored, lengths, where), "v")
        read = np.asarray(read_tokens(stored))[0, 0]
        for head, own in enumerate((read[:5], read[5:7], read[7:9])):
            np.testing.assert_allclose(found[0, head], own.T @ own, atol=1e-4)


def test_the_moment_of_codes_is_that_of_their_coefficients():
    steps = Steps(jnp.abs(normal(1, 2, 4)) + 0.1, normal(1, 2, 4))
    stored = empty_water_filled(1, 2, 9, ((8, 3), (4, 1))).filled(steps.count(normal(1, 2, 9, 4)))
    gaps = jnp.zeros((1, 2), jnp.int32)
    found = moment(Coded(stored, stored, jnp.array([6]), Runs(gaps, gaps)), "k", steps)
    wide = np.asarray(steps.widen(stored.read_block(0, 9)))[:, :, :6]
    np.testing.assert_allclose(found, np.einsum("bjsr,bjsp->bjrp", wide, wide), rtol=1e-4)


# ---- what is forgotten


def text(directions, count, seed):
    """Taps of one layer whose keys and values lie near a subspace of their own."""
    rng, spec = np.random.default_rng(seed), PLAIN.attention
    span = np.linalg.qr(np.random.default_rng(directions).normal(size=(spec.head_dim, spec.head_dim)))[0]
    fall = np.geomspace(3, 0.1, spec.head_dim)

    def draw(heads):
        return jnp.asarray(rng.normal(size=(1, count, heads, spec.head_dim)) * fall @ span.T, jnp.float32)

    k, v = draw(spec.kv_heads), draw(spec.kv_heads)
    return Taps(draw(spec.q_heads), k, k, v)


def lost(spec, bases, refreshes=24):
    """RER of values of the prompt, and of what came since."""
    codec, first, later = parse_method(spec), text(1, 128, 1), text(2, 16 * refreshes, 2)
    layout = make_layout(PLAIN, 1, 128, 128 + 16 * refreshes, block=16, dtype=jnp.float32)
    state = helpers.compress(machine_of(codec), layout, bases, (first,), jnp.array([128]))
    store = state.store
    step = jax.jit(lambda store, tokens: codec.take_in(layout, bases, store, (tokens,), jnp.array([16]), jnp.array([16])))
    for at in range(0, 16 * refreshes, 16):
        k, v = later.k[:, at : at + 16], later.v[:, at : at + 16]
        store = step(store, Tokens(k, k, v, 128 + at + jnp.arange(16)[None]))
    begin = 116  # those between the ends
    rebuilt = np.asarray(codec.rebuilt(layout, bases, store)[1])[0, :, : begin + 16 * refreshes].swapaxes(0, 1)
    true = np.concatenate([np.asarray(first.v)[0, 4:120], np.asarray(later.v)[0]])
    left = (true - rebuilt) ** 2
    return left[:begin].sum() / (true[:begin] ** 2).sum(), left[begin:].sum() / (true[begin:] ** 2).sum()


def test_steps_anchored_by_what_is_stored_forget_less():
    bases = bases_for(parse_method("ojakv:rank=4,rope=post,heads=per_head"))[0]
    new, old, still = (lost(f"ojakv:rank=4,rope=post,heads=per_head,{ENDS},{rule}", bases)
                       for rule in ("normalize_dec=stored", OLD, "eta_dec=0,eta_pre=0"))
    assert new[0] < old[0]
    assert sum(new) < sum(old) and new[1] < still[1]


# ---- learning from a prompt


def test_a_prompts_queries_teach_the_bases_of_keys():
    spec = "ojakv:rank=4,rope=post,heads=per_head,steps=4"
    bases, layout = bases_for(parse_method(spec))[0], make_layout(PLAIN, 1, 96, 128, dtype=jnp.float32)
    taps, found = text(1, 96, 1), {}
    taps = taps._replace(q=text(3, 96, 4).q)
    for learns in ("keys", "queries_and_keys"):
        machine = machine_of(parse_method(f"{spec},learns={learns}"))
        found[learns] = helpers.compress(machine, layout, bases, (taps,), jnp.array([96])).store
    np.testing.assert_array_equal(found["keys"].v_basis, found["queries_and_keys"].v_basis)

    def logits_lost(store):
        u = np.asarray(store.k_basis[0])
        k = np.asarray(taps.k[0]).swapaxes(0, 1)
        error = k - k @ u @ u.swapaxes(-1, -2)
        q = np.asarray(taps.q[0]).reshape(96, len(u), -1, k.shape[-1])
        return np.mean(np.einsum("tkgd,ksd->ktgs", q, error) ** 2)

    assert logits_lost(found["queries_and_keys"]) < 0.8 * logits_lost(found["keys"])


def test_in_a_sliding_window_salient_tokens_are_those_that_are_seen():
    q, k, lengths = normal(1, 40, 4, 8), normal(1, 40, 2, 8), jnp.array([37])
    scores = np.asarray(window_attention(q, k, lengths, 5, scale=0.4, sliding=6))
    expected = np.zeros((2, 40))
    for i in range(32, 37):
        for head in range(4):
            logits = np.asarray(k[0, i - 5 : i + 1, head // 2] @ q[0, i, head]) * 0.4
            expected[head // 2, i - 5 : i + 1] += np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    np.testing.assert_allclose(scores[0], expected, atol=1e-5)


def test_salience_takes_the_window_of_the_layer():
    codec, spec = parse_method("ojakv:paper,rank=4,window=4,top=0.1"), WINDOWED.attention
    layout = make_layout(WINDOWED, 1, 96, 128, dtype=jnp.float32)
    assert (layout.of_layer(0).window, layout.of_layer(1).window) == (24, None)
    taps = Taps(normal(1, 96, spec.q_heads, spec.head_dim), *(normal(1, 96, spec.kv_heads, spec.head_dim),) * 3)
    index, weight = codec._salient(layout.of_layer(0), taps, jnp.array([96]))
    assert weight.sum() == 9 and index.min() >= 96 - 24 - 3
    assert codec._salient(layout.of_layer(1), taps, jnp.array([96]))[0].min() < 96 - 24 - 3


# ---- with a selection, and in which precision


def test_the_papers_rule_follows_decoded_tokens_behind_snapkv_too():
    method = parse_method(f"ojakv:paper,rank=4,{ENDS}+snapkv:budget=40,{ENDS}")
    bases, tokens = bases_for(method), prompts(2, 120)
    cache, _ = prefill(method, PLAIN, model().params, tokens[:, :96], bases=bases, capacity=160, block=8)
    before = [np.asarray(group.store.k_basis) for group in cache.groups]
    for at in (96, 104, 112):
        cache, logits = extend(method, PLAIN, model().params, cache, tokens[:, at : at + 8], bases=bases)
        cache = refresh(method, cache, bases=bases)
    assert np.isfinite(logits).all()
    for was, group in zip(before, cache.groups, strict=True):
        assert (np.asarray(group.store.k_basis) != was).any()


def products(jaxpr):
    """All matrix products of a program, those of its loops and branches too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("fields", ["", OLD, "learns=keys,rope=post", "rope=post,heads=joint", "bits=2.5", "estimator=covariance"])
def test_bases_move_and_coefficients_follow_in_the_highest_precision(fields):
    codec = parse_method(f"ojakv:rank=4,{ENDS}" + (f",{fields}" if fields else ""))
    bases, layout = bases_for(codec)[0], make_layout(PLAIN, 1, 96, 512, dtype=jnp.float32)
    taps, weight = text(1, 96, 1), jnp.ones((1, 96))

    def moved(taps, lengths):
        store = codec.learn(layout, bases, codec.empty(layout, bases, 700), (taps,), lengths, weight)
        tokens = Tokens(taps.k[:, :16], taps.k_pre[:, :16], taps.v[:, :16], jnp.arange(16)[None])
        return codec.take_in(layout, bases, store, (tokens,), jnp.array([16]), jnp.array([16]))

    found = list(products(jax.make_jaxpr(moved)(taps, jnp.array([96])).jaxpr))
    assert len(found) > 6
    for equation in found:
        assert equation.params["precision"] is not None, equation
        assert {jax.lax.Precision.HIGHEST} == set(equation.params["precision"]), equation


@pytest.mark.parametrize("field, value", [("learns", "queries"), ("normalize_dec", "most"), ("normalize", "stored")])
def test_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field}='{value}': allowed are "):
        parse_method(f"ojakv:{field}={value}")


def test_the_paper_is_a_preset():
    method = parse_method("ojakv:paper")
    assert (method.rope, method.heads, method.learns, method.normalize_dec) == ("post", "per_head", "keys", "none")
    assert dataclasses.replace(method, eta_dec=0.1) == parse_method("ojakv:paper,eta_dec=0.1")
