"""Quantised storage against float64 oracles: KIVI, 8-bit KV, coefficients that are appended and moved."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, PROMPT, bases_for, model, prompts, run, transported
from kivi_oracle import kivi_oracle

from lowrank_kv_jax.generation.forward import compress_group, embed_tokens, layer_prefill, make_layout
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.quantised import Tile, append_tokens, empty_tokens, map_tokens, read_tokens, store_tokens

SHAPE = (2, 3, 64, 10)
store = jax.jit(store_tokens, static_argnums=(1, 2, 3))
read = jax.jit(read_tokens)


def tokens(seed=0, shape=SHAPE):
    """Channels of very different size, with offsets, as keys have them."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** -np.linspace(0, 3, shape[-1])
    return ((rng.normal(size=shape) + rng.normal(size=shape[-1])) * scale).astype(np.float32)


KIVI_KEYS, KIVI_VALUES, PER_TOKEN = Tile(32, 1), Tile(1, 4), Tile(1, None)


@pytest.mark.parametrize("bits, tile", [(2, KIVI_KEYS), (4, KIVI_VALUES), (8, PER_TOKEN), (4, KIVI_KEYS), (2, KIVI_VALUES)])
def test_codes_err_by_half_a_step_of_their_group(bits, tile):
    x = tokens()
    stored = store(jnp.asarray(x), bits, None, tile)
    wide = np.asarray(read(stored), np.float64)
    rebuilt, bound = kivi_oracle(x, bits, tile)
    assert (np.abs(wide - x) <= bound + 1e-9).all()
    # no worse than the textbook rule in float64, which hits the largest entry of each group with its unrounded scale
    assert np.mean((wide - x) ** 2) <= 1.25 * np.mean((rebuilt - x) ** 2)
    np.testing.assert_array_equal(jax.jit(lambda stored: stored.read_block(20, 30))(stored), wide[:, :, 20:50].astype(np.float32))
    each = -(-10 // (8 // bits))
    assert stored.codes.shape == (2, 3, 64, each) and stored.codes.dtype == (np.int8 if bits == 8 else np.uint8)
    groups = (2, 3, -(-64 // tile.tokens), -(-10 // (tile.channels or 10)))
    sides = [stored.scales] if bits == 8 else [stored.scales, stored.lows]
    assert all(side.shape == groups and side.dtype.itemsize == 2 for side in sides)
    assert sum(a.nbytes for a in jax.tree.leaves(stored)) == 2 * 3 * 64 * each + 2 * len(sides) * np.prod(groups)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_groups_without_a_range_are_kept(bits):
    x = np.zeros((1, 1, 32, 4), np.float32)
    x[..., 1], x[..., 2], x[:, :, 5, 3] = 7.3, -1e-30, 1.0
    wide = np.asarray(read(store(jnp.asarray(x), bits, None, KIVI_KEYS)))
    assert np.isfinite(wide).all()
    np.testing.assert_allclose(wide, x, rtol=0.01, atol=1e-6)
    np.testing.assert_array_equal(wide[..., 0], 0)


@pytest.mark.parametrize("bits, tile", [(8, Tile(16, 1)), (2, Tile(16, 1)), (4, KIVI_VALUES)])
def test_tokens_can_be_appended_in_pieces(bits, tile):
    """Rows grow at their own pace; free slots stay zero, and do not widen a range."""
    x = tokens()
    stored, length = store(jnp.zeros(SHAPE), bits, None, tile), jnp.array([0, 0])
    append = jax.jit(append_tokens)
    for taken in ([7, 3], [9, 0], [9, 9], [5, 4]):
        new = np.stack([x[b, :, n : n + 9] for b, n in enumerate(np.asarray(length))])
        stored = append(stored, jnp.asarray(new), length, jnp.array(taken))
        length = length + jnp.array(taken)
    wide, (_, bound) = np.asarray(read(stored)), kivi_oracle(x, bits, tile)
    for row, n in enumerate(np.asarray(length)):
        times = 1 if tile.tokens == 1 else 4  # a tile may be coded anew with each piece
        assert (np.abs(wide[row, :, :n] - x[row, :, :n]) <= times * bound[row, :, :n].max((1, 2), keepdims=True) + 1e-6).all()
        if bits == 8:
            assert not wide[row, :, n:].any()
    with pytest.raises(ValueError, match="60 slots: .* multiple of the 16 tokens"):
        append_tokens(store_tokens(jnp.zeros((1, 1, 60, 2)), 8, None, Tile(16, 1)), jnp.zeros((1, 1, 1, 2)), length[:1], length[:1])


def test_empty_storage_is_that_of_zeros():
    for bits, tile in ((None, Tile()), (8, PER_TOKEN), (2, KIVI_KEYS), (4, KIVI_VALUES)):
        empty, zeros = empty_tokens(SHAPE, bits, jnp.bfloat16, tile), store(jnp.zeros(SHAPE), bits, jnp.bfloat16, tile)
        chex.assert_trees_all_equal_structs(empty, zeros)
        chex.assert_trees_all_equal(empty, zeros)
        assert [x.dtype for x in jax.tree.leaves(empty)] == [x.dtype for x in jax.tree.leaves(zeros)]


def test_moved_coefficients_are_quantised_anew():
    x = tokens(shape=(2, 1, 128, 8))
    old, new = (np.linalg.qr(np.random.default_rng(s).normal(size=(2, 1, 12, 8)))[0] for s in (0, 1))
    lengths = jnp.array([128, 50])
    moved = jax.jit(transported)(store(jnp.asarray(x), 8, None), lengths, jnp.asarray(old), jnp.asarray(new))
    plain = jax.jit(transported)(jnp.asarray(x), lengths, jnp.asarray(old, jnp.float32), jnp.asarray(new, jnp.float32))
    for row, n in enumerate((128, 50)):
        assert np.abs(read(moved)[row, :, :n] - plain[row, :, :n]).max() < 0.02 * np.abs(plain).max()
    with pytest.raises(ValueError, match="60 slots: storage that changes"):
        map_tokens(store_tokens(jnp.zeros((1, 1, 60, 2)), 8, None, Tile(16, 1)), lengths[:1], lambda x: x, lengths[:1] > 0)


# ---- KIVI as a method -------------------------------------------------------------------------------------------


def tokens_of_a_prompt():
    return prompts(length=PROMPT + 20)


@pytest.mark.parametrize("spec", ["kivi:bits=2,recent=8", "kivi:int8", "kivi:bits=4,keys=per_token,group=4,recent=5,sinks=3"])
def test_stored_prompts_equal_the_oracle(spec):
    """The exact window is exact, and of each row whole groups are quantised."""
    method = parse_method(spec)
    toks, lengths = tokens_of_a_prompt()[:, :PROMPT], jnp.array([PROMPT, 71])
    params = model().params
    positions = jnp.arange(PROMPT)[None] + 0 * toks
    _, taps = layer_prefill(PLAIN, None, params["layers"][0], embed_tokens(PLAIN, params, toks), positions)
    layout = make_layout(PLAIN, 2, PROMPT, 160, 16, jnp.float32)
    state = compress_group(method, layout, None, (taps,), lengths)
    k_tile, v_tile = state.store.tokens.k.tile, state.store.tokens.v.tile
    for row, length in enumerate((PROMPT, 71)):
        count = int(state.store.tokens.length[row])
        assert count == (length - method.sinks - method.recent) // method.unit * method.unit
        assert int(state.ends[0].length[row]) == length - count
        for stored, x, tile in ((state.store.tokens.k, taps.k, k_tile), (state.store.tokens.v, taps.v, v_tile)):
            own = np.asarray(x)[row, method.sinks : method.sinks + count].swapaxes(0, 1)[None]
            _, bound = kivi_oracle(own, method.bits, tile)
            assert (np.abs(read(stored)[row : row + 1, :, :count] - own) <= bound + 1e-7).all()


@pytest.mark.slow
def test_more_bits_err_less_and_cost_more():
    toks = tokens_of_a_prompt()
    exact = run(REGISTRY["full"](), PLAIN, toks, PROMPT)[1][:, 1:]
    errors, sizes = [], []
    for spec in ("kivi:bits=2,recent=8", "kivi:bits=4,recent=8", "kivi:bits=8,recent=8"):
        cache, logits = run(parse_method(spec), PLAIN, toks, PROMPT)
        errors.append(np.sqrt(np.mean((logits[:, 1:] - exact) ** 2)))
        sizes.append(cache_bytes(cache).total)
    assert errors[0] > 2 * errors[1] > 2 * 2 * errors[2] > 0
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("fields, message", [
    ({"bits": 3}, "bits=3: allowed are None, 2, 4, 8"), ({"group": 0}, "group=0"), ({"recent": -1}, "recent=-1"),
    ({"keys": "both"}, "keys='both'"), ({"group": None}, "group=None: keys='per_channel'"),
])
def test_kivi_refuses_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        REGISTRY["kivi"](**fields)


# ---- int8 coefficients of any basis method ----------------------------------------------------------------------


@pytest.mark.parametrize("spec", [
    pytest.param("static-pca-h:rank=0.5,bits=8", marks=pytest.mark.slow), "ojakv:rank=0.5,bits=8",
    pytest.param("single-svd:rank=0.5,bits=8,rope=post,decoded=coded", marks=pytest.mark.slow),
])
def test_coefficients_in_eight_bits_stay_close(spec):
    method, toks = parse_method(spec), tokens_of_a_prompt()
    method = dataclasses.replace(method, sinks=4, recent=8)
    plain = run(dataclasses.replace(method, bits=None), PLAIN, toks, PROMPT)
    coded = run(method, PLAIN, toks, PROMPT)
    assert coded[0].groups[0].store.tokens.k.codes.dtype == jnp.int8
    exact = run(REGISTRY["full"](), PLAIN, toks, PROMPT)[1]
    lost = np.sqrt(np.mean((plain[1] - exact)[:, 1:] ** 2))
    assert 0 < np.sqrt(np.mean((coded[1] - plain[1])[:, 1:] ** 2)) < 0.1 * lost
    spent = [cache_bytes(cache, bases_for(method)).by_kind for cache, _ in (plain, coded)]
    assert spent[1]["coefficients"] + spent[1]["scales"] < 0.5 * spent[0]["coefficients"]  # of float32; whole tiles


def test_bits_stay_in_their_range():
    with pytest.raises(ValueError, match="bits=9: allowed are None, 2, 4, 8"):
        parse_method("ojakv:bits=9")
