"""`decoding=code`: the prompt is chosen from once, and what comes later is coded and stays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions
from helpers import CAPACITY, PLAIN, PROMPT, model, prompts, run
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import decode_step, make_layout, prefill, refresh
from lowrank_kv_jax.method import Place, in_order, voting
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork
from lowrank_kv_jax.method.codec import codes_of, hold
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.quantised import read_tokens
from lowrank_kv_jax.testing import PROMISES
from lowrank_kv_jax.testing.moments import bases_for

STEPS, BLOCK = 24, 8
ONE = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
SPECS = [  # slots of heads packed in one buffer, one buffer for all heads, and one a head
    "static-pca:rank=1.0,sinks=4,recent=8+adakv:keep=0.5,recent=8,decoding=code",
    "transform:bits=4,sinks=4,recent=8+kvzip:keep=0.5,decoding=code",
    "kivi:bits=8+snapkv:keep=0.5,recent=8,decoding=code+moments",
    "transform:bits=4,kv=joint,heads=per_head,sinks=4,recent=8+snapkv:keep=0.5,recent=8,decoding=code",
]


@pytest.mark.parametrize("spec", [SPECS[0], *(pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS[1:])])
def test_it_keeps_every_promise(spec):
    for promise in PROMISES:
        promise(parse_method(spec), ONE, (PROMPT, 70))


@pytest.mark.parametrize("rule", [pytest.param("snapkv:keep=0.5,recent=8", marks=pytest.mark.slow), "adakv:keep=0.5,recent=8"])
def test_exact_codes_make_it_what_decoding_keep_is(rule):
    tokens = prompts(length=PROMPT + STEPS)
    kept, coded = (run(parse_method(f"{rule},decoding={decoding}"), PLAIN, tokens, PROMPT, width=4)[1]
                   for decoding in ("keep", "code"))
    np.testing.assert_allclose(coded, kept, atol=1e-5)


def test_later_tokens_join_those_that_were_chosen_and_take_less_room():
    rule = "kivi:bits=4+snapkv:keep=0.5,recent=8,decoding="
    method = parse_method(rule + "code")
    cache, logits = prefill(
        method, PLAIN, model(PLAIN).params, prompts(), jnp.array([PROMPT, 70]), capacity=PROMPT + STEPS, block=BLOCK,
        dtype=jnp.float32,
    )
    chosen = kept_positions(cache.groups[0])
    for step in range(STEPS):
        if step and step % BLOCK == 0:
            cache = refresh(method, cache)
        cache, logits = decode_step(method, PLAIN, model(PLAIN).params, cache, logits.argmax(-1).astype(jnp.int32))
    assert np.isfinite(np.asarray(logits)).all()
    row = refresh(method, fork(cache)).groups[0]
    for before, after in zip(chosen, kept_positions(row), strict=True):
        assert list(after[: len(before)]) == list(before)
        later = np.asarray(after[len(before):])
        np.testing.assert_array_equal(later, np.arange(later[0], later[0] + len(later)))
        assert later[-1] == PROMPT + STEPS - 8 - 1  # all but the recent ones
    wide, narrow = (cache_bytes(prefill(parse_method(rule + one), PLAIN, model(PLAIN).params, prompts(), capacity=PROMPT + 256,
                                        block=BLOCK)[0]).total for one in ("keep", "code"))
    assert narrow < wide


def test_a_cache_says_where_it_is_full():
    method, bases = parse_method(SPECS[0]), None
    bases = bases_for(method, PLAIN)
    cache, logits = prefill(method, PLAIN, model(PLAIN).params, prompts(), capacity=PROMPT + BLOCK, block=BLOCK, bases=bases)
    for step in range(BLOCK + 1):
        if step == BLOCK:
            cache = refresh(method, cache, bases=bases)
        assert np.isfinite(np.asarray(logits, np.float32)).all()
        cache, logits = decode_step(method, PLAIN, model(PLAIN).params, cache, logits.argmax(-1).astype(jnp.int32), bases=bases)
    assert np.isnan(np.asarray(logits, np.float32)).all()


# ---- what is appended, against a store that is laid anew


def taps_of(seed, tokens):
    rng, spec = np.random.default_rng(seed), PLAIN.attention
    q, k, k_pre, v = (jnp.asarray(rng.normal(size=(2, tokens, heads, spec.head_dim)), jnp.float32)
                      for heads in (spec.q_heads, *(spec.kv_heads,) * 3))
    return Taps(q, k, k_pre, v, jnp.zeros((2, tokens, 1)))


def laid_anew(machine, layout, bases, state):
    """The store with all that it holds taken out, and coded again before what leaves the exact ends."""
    ends, store = machine.ends_of(layout, bases), state.store
    leaving, (_, counts, _) = in_order.oldest(layout, state.ends[0], ends.first, BLOCK), voting.flush(state, ends, BLOCK)
    length, where = store.tokens.length, store.tokens.positions
    new = machine.codec.encode(layout, bases.codec, store, (leaving,))

    def behind(old, new):
        line = jnp.concatenate([old, jnp.zeros_like(new, old.dtype)], axis=2)
        at = length[:, None] + jnp.arange(new.shape[2])
        return jax.vmap(lambda row, fresh, i: row.at[:, i].set(fresh.astype(row.dtype)))(line, new, at)[:, :, : old.shape[2]]

    each = jnp.broadcast_to(leaving.positions[:, None, :, None], (*where.position.shape[:2], BLOCK, 1))
    position = behind(where.position[..., None], each)[..., 0]
    codes = (behind(old, fresh) for old, fresh in zip(codes_of(store), new, strict=True))
    return hold(store, *codes, length + counts, PerHead(position, None, where.kv_heads))


@functools.cache
def two_blocks(spec):
    """A compiled prompt and two blocks of tokens: states before and after each refresh, and stores laid anew."""
    method = parse_method(spec)
    machine, layout = machine_of(method), make_layout(PLAIN, 2, PROMPT, CAPACITY, BLOCK, jnp.float32)
    bases = machine.group_bases(PLAIN.attention, bases_for(method, PLAIN))[0]

    @jax.jit
    def program(bases, prompt, lengths, block, counts):
        state = machine.compress(layout, bases, machine.init(layout, bases), (prompt,), lengths)

        def step(state, count):
            before = machine.append(layout, bases, state, block, count, lengths[:, None] + jnp.arange(BLOCK), Place())
            after = machine.refresh(layout, bases, before)
            return after, (before, after, laid_anew(machine, layout, bases, before))

        return jax.lax.scan(step, state, counts)[1]

    return functools.partial(program, bases, taps_of(0, PROMPT)), taps_of(1, BLOCK)


@pytest.mark.parametrize("spec", [
    "kivi:bits=4+snapkv:keep=0.5,recent=8,decoding=code",  # tiles of tokens that share a scale
    pytest.param("transform:bits=2,sinks=4,recent=8+h2o:keep=0.5,recent=8,decoding=code", marks=pytest.mark.slow),
    pytest.param("full+snapkv:keep=0.5,recent=8,decoding=code", marks=pytest.mark.slow),
    pytest.param("static-pca:bits=8+h2o:keep=0.5,recent=8,decoding=code", marks=pytest.mark.slow),
    pytest.param("palu:bits=2.5+h2o:keep=0.5,recent=8,decoding=code", marks=pytest.mark.slow),
])
@settings(max_examples=20, deadline=None)
@given(lengths=st.tuples(*[st.integers(1, PROMPT)] * 2), counts=st.tuples(*[st.integers(0, BLOCK)] * 4))
def test_an_append_is_to_the_bit_what_a_store_laid_anew_is(spec, lengths, counts):
    """Rows that are idle, and tiles that no token comes to, are what they were: to code them again may change a scale."""
    program, block = two_blocks(spec)
    before, after, anew = program(jnp.asarray(lengths, jnp.int32), block, np.reshape(counts, (2, 2)).astype(np.int32))
    for i, row in np.ndindex(2, 2):
        old, new, wanted = (jax.tree.map(lambda x, at=(i, row): np.asarray(x[at]), own) for own in (
            before.store, after.store, anew))
        begin, length = old.tokens.length, new.tokens.length
        assert length == wanted.tokens.length
        if begin == length:
            jax.tree.map(np.testing.assert_array_equal, new, old)
            continue
        where = (own.tokens.positions.position for own in (new, wanted))
        np.testing.assert_array_equal(*(x[:, :length] for x in where))
        for side in ("k", "v"):
            stored, *codes = (getattr(own.tokens, side) for own in (new, old, new, wanted))
            kept = begin // stored.tile.tokens * stored.tile.tokens if hasattr(stored, "tile") else begin
            held, now, again = (codes_in(x) for x in codes)
            np.testing.assert_array_equal(now[:, :kept], held[:, :kept])
            np.testing.assert_array_equal(now[:, kept:length], again[:, kept:length])


def codes_in(stored):
    """`[J, S, R]` of a row's codes `[J, S, R]`, read."""
    return np.asarray(read_tokens(jax.tree.map(lambda x: x[None], stored))[0])
