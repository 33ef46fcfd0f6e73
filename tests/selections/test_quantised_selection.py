"""Selected tokens in few bits: KIVI as the codec of a composition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions
from helpers import PLAIN, PROMPT, QWEN, model, prompts, random_moments, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kivi_oracle import kivi_oracle

from lowrank_kv_jax.codecs.palu import Palu
from lowrank_kv_jax.generation.forward import decode_step, make_layout, prefill
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork, with_token_layout
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.packed import empty_packed, hold_packed
from lowrank_kv_jax.storage.quantised import Tile, read_tokens, store_tokens
from lowrank_kv_jax.storage.state import walk

RULES = ["snapkv:keep=0.6,recent=8,decoding=keep", "kvzip:keep=0.6,recent=8,layers=uniform",
         "kvzip:keep=0.6,recent=8,allocation=uniform,layers=uniform", "adakv:keep=0.6,recent=8,decoding=keep"]
LENGTHS = jnp.array([PROMPT, 70])
ONE, TWO = (dataclasses.replace(PLAIN, num_layers=n, windows=(None,) * n) for n in (1, 2))
PIECE = 11  # tokens

read_block = jax.jit(lambda stored, start, size: stored.read_block(start, size), static_argnums=2)
hold = jax.jit(lambda x, owner, count, bits: hold_packed(empty_packed(1, 3, x.shape[2], 6, bits, 32), x, owner, count), static_argnums=3)
hold_alone = jax.jit(lambda x, bits: read_tokens(store_tokens(x, bits, None, Tile(32, 1))), static_argnums=1)


def prefilled(spec, config=PLAIN, lengths=LENGTHS, tokens=None, **options):
    method = parse_method(spec)
    tokens = prompts(vocab=config.vocab_size) if tokens is None else tokens
    bases = method.fit(config.attention, random_moments(config)) if method.calibrated else None
    options = {"capacity": PROMPT + 48, "block": 16, "dtype": jnp.float32} | options
    return method, bases, *prefill(method, config, model(config).params, tokens, lengths, bases=bases, **options)


@pytest.mark.parametrize("config, codec, rule, error", [
    (PLAIN, "kivi:bits=none", "snapkv:keep=1.0,recent=8,decoding=keep", 1e-4),
    (QWEN, "kivi:bits=none", "kvzip:keep=1.0,layers=uniform", 1e-4),
    pytest.param(PLAIN, "kivi:bits=8", "kvzip:keep=1.0,layers=uniform", 0.05, marks=pytest.mark.slow),
    (QWEN, "kivi:int8", "snapkv:keep=1.0,recent=8,decoding=keep", 0.05),
])
def test_at_full_budget_only_the_codes_err(config, codec, rule, error):
    tokens = prompts(length=PROMPT + 24, vocab=config.vocab_size)
    _, exact = run(REGISTRY["full"](), config, tokens, PROMPT, width=4)
    _, logits = run(parse_method(f"{codec}+{rule}"), config, tokens, PROMPT, width=4)
    assert np.abs(logits - exact).max() < error


@pytest.mark.parametrize("rule, bits", [  # packed by head or not
    pytest.param(rule, bits, marks=[] if rule in RULES[1::2] else pytest.mark.slow) for rule, bits in zip(RULES, (4, 2, 4, 8), strict=True)])
def test_the_same_tokens_stay_and_are_half_a_step_away(rule, bits):
    """In groups of 32 tokens of one head, in the order of their positions; the last one of a head may be short."""
    _, _, plain, _ = prefilled(rule)
    _, _, coded, _ = prefilled(f"kivi:bits={bits}+{rule}")
    for one, other in zip(plain.groups, coded.groups, strict=True):
        wides = {side: np.asarray(read_block(stored := getattr(other.store.tokens, side), 0, stored.shape[2]), np.float64)
                 for side in ("k", "v")}
        one, held = jax.tree.map(np.asarray, (one, other))
        for row, length in enumerate(one.store.tokens.length):
            a, b = (jax.tree.map(lambda x, row=row: x[row : row + 1], state) for state in (one, held))
            assert kept_positions(a) == kept_positions(b)
            owner = one.store.tokens.positions.owner
            owner = np.zeros(length, int) if owner is None else np.asarray(owner)[row, 0, :length]
            for side in ("k", "v"):
                x, stored, wide = getattr(a.store.tokens, side), getattr(other.store.tokens, side), wides[side][[row]]
                for head in np.unique(owner):  # no group has tokens of two heads
                    own = np.flatnonzero(owner == head)
                    _, bound = kivi_oracle(x[:, :, own], bits, Tile(32, 1) if side == "k" else Tile(1, 32))
                    assert (np.abs(wide[:, :, own] - x[:, :, own]) <= bound + 1e-6).all()
                    first = min(int(own[0]), stored.shape[2] - PIECE)
                    part = np.asarray(read_block(stored, first, PIECE))[[row]]  # from any slot
                    np.testing.assert_array_equal(part, wide[:, :, first : first + PIECE])


@settings(max_examples=25)
@given(st.tuples(*[st.integers(0, 40)] * 3), st.sampled_from([2, 4, 8]))
def test_packed_heads_share_no_scale(counts, bits):
    """Whatever the heads' shares of the buffer: every head is coded as in a buffer of its own."""
    size, width, free = 120, 64, 120 - sum(counts)
    rng = np.random.default_rng(size)
    parts = [rng.normal(size=(1, 1, n, 6)) * 10.0 ** rng.integers(-2, 3) for n in counts]
    x = np.concatenate([*parts, np.full((1, 1, free, 6), 1e6)], axis=2).astype(np.float32)
    owner = np.repeat(np.array([0, 1, 2, 0], np.int8), [*counts, free])[None, None]
    stored = hold(x, owner, np.array([sum(counts)], np.int32), bits)
    wide, begin = np.asarray(read_block(stored, 0, size)), 0
    for n, part in zip(counts, parts, strict=True):
        if n:
            alone = np.pad(part, ((0, 0), (0, 0), (0, width - n), (0, 0)), mode="edge").astype(np.float32)
            own = np.asarray(hold_alone(alone, bits))
            np.testing.assert_allclose(wide[:, :, begin : begin + n], own[:, :, :n], rtol=1e-6, atol=1e-30)
        begin += n


def test_a_row_of_a_ragged_batch_equals_the_row_alone_and_jit_equals_eager():
    spec, tokens, params = f"kivi:bits=4+{RULES[1]}", prompts(), model(ONE).params
    method, bases, cache, logits = prefilled(spec, ONE)
    step = jax.jit(lambda cache, token: decode_step(method, ONE, params, cache, token, bases=bases))
    _, together = step(cache, jnp.array([3, 5]))
    _, eager = decode_step(method, ONE, params, cache, jnp.array([3, 5]), bases=bases)
    np.testing.assert_allclose(together, eager, atol=1e-5)
    for row, token in enumerate((3, 5)):
        _, _, own, first = prefilled(spec, ONE, lengths=LENGTHS[row : row + 1], tokens=tokens[row : row + 1])
        _, alone = step(own, jnp.array([token]))
        np.testing.assert_allclose(first[0], logits[row], atol=1e-5)
        np.testing.assert_allclose(alone[0], together[row], atol=1e-4)


def test_bytes_are_foretold_and_of_the_kinds_that_they_are():
    method, bases, cache, _ = prefilled("kivi:bits=4+kvzip:keep=0.6,recent=8", TWO)
    spent = cache_bytes(cache, bases)
    layout = make_layout(TWO, 2, PROMPT, PROMPT + 48, 16, "float32")
    assert spent.by_kind == cache_bytes(abstract_cache(method, layout, bases), bases).by_kind
    held = [group.store.tokens for group in cache.groups]
    assert spent.by_kind["coefficients"] == sum(x.k.codes.nbytes + x.v.codes.nbytes for x in held)
    assert spent.by_kind["scales"] == sum(side.scales.nbytes + side.lows.nbytes for x in held for side in (x.k, x.v))
    _, _, plain, _ = prefilled("kvzip:keep=0.6,recent=8", TWO)
    slots = [[group.store.tokens.k.shape[2] for group in c.groups] for c in (plain, cache)]
    assert len(set(slots[1])) > 1 and slots[0] == slots[1]  # layers have their shares
    assert {info.kind for _, _, info in walk(held[0])} == {"coefficients", "scales", "indices"}


def test_layers_shares_are_fitted_beside_a_codec_and_no_other_bases_are():
    method = parse_method("kivi:bits=4+kvzip:keep=0.5")
    assert method.calibrated and method.reads == {"votes"} and method.rereads
    assert spell_method(method) == "kivi:bits=4+kvzip:keep=0.5"
    assert method.fit_key(PLAIN.attention) == method.selection.fit_key(PLAIN.attention)
    assert not parse_method("kivi+snapkv:decoding=keep").calibrated
    assert Palu.bases_type is not None  # codecs with bases keep theirs
    assert parse_method("palu+snapkv:keep=0.5").bases_type is Palu.bases_type


def test_moments_of_the_rest_and_lanes():
    spec = "kivi:bits=8+snapkv:keep=0.4,recent=8,decoding=keep+moments"
    method, bases, cache, _ = prefilled(spec)
    (group, *_), gone = cache.groups, np.asarray(cache.groups[0].gone[0].count)
    kept = np.asarray(group.store.tokens.length)[:, None] + np.asarray(group.ends[0].length)[:, None]
    np.testing.assert_array_equal(gone + kept, np.broadcast_to(np.asarray(LENGTHS)[:, None], gone.shape))
    token = jnp.array([3, 5])
    _, rows = decode_step(method, PLAIN, model().params, fork(cache), token)
    _, lanes = decode_step(method, PLAIN, model().params, with_token_layout(cache, "lanes"), token)
    np.testing.assert_allclose(lanes, rows, atol=1e-5)


@pytest.mark.parametrize("spec, message", [
    ("kivi+streamingllm:keep=0.5", "keeps no token between"),
    ("kivi+snapkv:positions=cache,decoding=keep", "positions='cache'"),
    ("kivi+ojakv", "kivi and ojakv are both a codec"),
    ("kivi+moments", "nothing is evicted; add a selection"),
])
def test_what_does_not_go_together_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)
