"""Selected tokens in few bits: KIVI as the codec of a composition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions
from helpers import PLAIN, PROMPT, QWEN, model, prompts, random_moments, run
from test_quantised import kivi_oracle

from lowrank_kv_jax.accounting import cache_bytes
from lowrank_kv_jax.cache import fork
from lowrank_kv_jax.forward import decode_step, make_layout, prefill
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.palu import Palu
from lowrank_kv_jax.parse import parse_method, spell_method
from lowrank_kv_jax.saved_cache import abstract_cache
from lowrank_kv_jax.state import walk
from lowrank_kv_jax.token_layout import with_token_layout

RULES = ["snapkv:keep=0.6,recent=8,decoding=keep", "kvzip:keep=0.6,recent=8,layers=uniform",
         "kvzip:keep=0.6,recent=8,allocation=uniform,layers=uniform", "adakv:keep=0.6,recent=8,decoding=keep"]
LENGTHS = jnp.array([PROMPT, 70])


def prefilled(spec, config=PLAIN, lengths=LENGTHS, tokens=None, **options):
    method = parse_method(spec)
    tokens = prompts(vocab=config.vocab_size) if tokens is None else tokens
    bases = method.fit(config.attention, random_moments(config)) if method.calibrated else None
    options = {"capacity": PROMPT + 48, "block": 16, "dtype": jnp.float32} | options
    return method, bases, *prefill(method, config, model(config).params, tokens, lengths, bases=bases, **options)


@pytest.mark.parametrize("config", [PLAIN, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("codec, error", [("kivi:bits=none,recent=8", 1e-4), ("kivi:int8,recent=8", 0.05)])
@pytest.mark.parametrize("rule", ["snapkv:keep=1.0,recent=8,decoding=keep", "kvzip:keep=1.0,layers=uniform"])
def test_at_full_budget_only_the_codes_err(config, codec, error, rule):
    tokens = prompts(length=PROMPT + 24, vocab=config.vocab_size)
    _, exact = run(REGISTRY["full"](), config, tokens, PROMPT, width=4)
    _, logits = run(parse_method(f"{codec}+{rule}"), config, tokens, PROMPT, width=4)
    assert np.abs(logits - exact).max() < error


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_tokens_stay_and_are_half_a_step_away(rule, bits):
    """In groups of 32 tokens in the order of head and position, whose last one is filled by tokens alone."""
    _, _, plain, _ = prefilled(rule)
    _, _, coded, _ = prefilled(f"kivi:bits={bits},recent=8+{rule}")
    for one, other in zip(plain.groups, coded.groups, strict=True):
        for row, length in enumerate(np.asarray(one.held.coded.length)):
            a, b = (jax.tree.map(lambda x, row=row: x[row : row + 1], state) for state in (one, other))
            assert kept_positions(a) == kept_positions(b)
            for side in ("k", "v"):
                x = np.asarray(getattr(a.held.coded, side))[:, :, :length]
                stored = getattr(b.held.coded, side)
                assert stored.shape[2] % 32 == 0 and stored.shape[2] - x.shape[2] < 32 + 3
                wide = np.asarray(stored.read_block(0, stored.shape[2]), np.float64)[:, :, :length]
                _, bound = kivi_oracle(x, bits, stored.tile)
                assert (np.abs(wide - x) <= bound + 1e-6).all()


def test_a_row_of_a_ragged_batch_equals_the_row_alone_and_jit_equals_eager():
    spec, tokens, params = f"kivi:bits=4,recent=8+{RULES[1]}", prompts(), model().params
    method, bases, cache, logits = prefilled(spec)
    step = jax.jit(lambda cache, token: decode_step(method, PLAIN, params, cache, token, bases=bases))
    _, together = step(cache, jnp.array([3, 5]))
    _, eager = decode_step(method, PLAIN, params, cache, jnp.array([3, 5]), bases=bases)
    np.testing.assert_allclose(together, eager, atol=1e-5)
    for row, token in enumerate((3, 5)):
        _, _, own, first = prefilled(spec, lengths=LENGTHS[row : row + 1], tokens=tokens[row : row + 1])
        _, alone = step(own, jnp.array([token]))
        np.testing.assert_allclose(first[0], logits[row], atol=1e-5)
        np.testing.assert_allclose(alone[0], together[row], atol=1e-4)


def test_bytes_are_foretold_and_of_the_kinds_that_they_are():
    method, bases, cache, _ = prefilled("kivi:bits=4,recent=8+kvzip:keep=0.6")
    spent = cache_bytes(cache, bases)
    layout = make_layout(PLAIN, 2, PROMPT, PROMPT + 48, 16, "float32")
    assert spent.by_kind == cache_bytes(abstract_cache(method, layout, bases), bases).by_kind
    held = [group.held.coded for group in cache.groups]
    assert spent.by_kind["coefficients"] == sum(x.k.codes.nbytes + x.v.codes.nbytes for x in held)
    assert spent.by_kind["scales"] == sum(side.scales.nbytes + side.lows.nbytes for x in held for side in (x.k, x.v))
    _, _, plain, _ = prefilled("kvzip:keep=0.6,recent=8")
    slots = [[group.held.coded.k.shape[2] for group in c.groups] for c in (plain, cache)]
    assert len(set(slots[1])) > 1 and all(0 <= b - a < 32 for a, b in zip(*slots, strict=True))  # whole groups
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
    spec = "kivi:bits=8,recent=8+snapkv:keep=0.4,recent=8,decoding=keep+moments"
    method, bases, cache, _ = prefilled(spec)
    held, gone = cache.groups[0].held, np.asarray(cache.groups[0].evicted.count)
    kept = np.asarray(held.coded.length)[:, None] + np.asarray(held.exact.length)[:, None]
    np.testing.assert_array_equal(gone + kept, np.broadcast_to(np.asarray(LENGTHS)[:, None], gone.shape))
    token = jnp.array([3, 5])
    _, rows = decode_step(method, PLAIN, model().params, fork(cache), token)
    _, lanes = decode_step(method, PLAIN, model().params, with_token_layout(cache, "lanes"), token)
    np.testing.assert_allclose(lanes, rows, atol=1e-5)


@pytest.mark.parametrize("spec, message", [
    ("kivi+snapkv:keep=0.5", r"kivi\+snapkv: decoding='evict' cannot be combined with quantised storage"),
    ("kivi+streamingllm:keep=0.5,decoding=keep", "a selection that keeps nothing"),
    ("kivi+snapkv:budget_bytes=90000,decoding=keep", "budget_bytes=90000 cannot be combined"),
    ("kivi+snapkv:positions=cache,decoding=keep", "positions='cache'"),
    ("kivi+ojakv", "kivi and ojakv are both a codec"),
    ("kivi+moments", "nothing is evicted; add a selection"),
])
def test_what_does_not_go_together_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)
