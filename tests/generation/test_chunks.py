"""Prompts that come in chunks: exact where nothing is lost, of the same shape where something is, in memory that stays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    CAPACITY,
    PLAIN,
    PROMPT,
    REGISTRY,
    WINDOWED,
    bases_for,
    exact_configuration,
    methods,
    model,
    small_configuration,
)

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.generation import chunks
from lowrank_kv_jax.generation.forward import extend, prefill
from lowrank_kv_jax.generation.groups import ingest_group
from lowrank_kv_jax.generation.layers import layer_read
from lowrank_kv_jax.method.neighbours import Neighbours
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.selections.budgeted import Budgeted
from lowrank_kv_jax.selections.reread import SINKS, Past, reread_attention, reread_positions
from lowrank_kv_jax.selections.window_scores import chunked, pooled
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.testing.promises import assert_exact, shapes_of, text

CHUNK = 40
LENGTHS = jnp.array([PROMPT, 30], jnp.int32)  # the second row ends within the first chunk
ONE, TWO = (dataclasses.replace(PLAIN, num_layers=n, windows=(None,) * n) for n in (1, 2))


def prefilled(method, config, chunk, lengths=LENGTHS, **options):
    options = {"capacity": CAPACITY, "block": 16, "dtype": jnp.float32, **options}
    return prefill(method, config, model(config).params, text(config)[:, :PROMPT], lengths,
                   bases=bases_for(method, config), chunk=chunk, **options)


def answers(method, config, chunk):
    """Logits at the prompt's last tokens and at 8 more behind them."""
    cache, logits = prefilled(method, config, chunk)
    more = text(config)[:, PROMPT : PROMPT + 8]
    _, after = extend(method, config, model(config).params, cache, more, bases=bases_for(method, config))
    return np.stack([np.asarray(logits), np.asarray(after)], axis=1)


@functools.cache
def exact_answers(config=TWO):
    return answers(REGISTRY["full"](), config, None)


QUICK = ("full", "kivi", "ojakv")  # verbatim, in bits, in a basis that moves; the votes of a selection are asked below
exact_names = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
               for name in sorted(REGISTRY) if REGISTRY[name].exact_at is not None]


@pytest.mark.parametrize("name", exact_names)
def test_full_rank_and_budget_are_exact_in_chunks(name):
    assert_exact(answers(exact_configuration(REGISTRY[name]), TWO, CHUNK), exact_answers())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 40, 64])
@pytest.mark.parametrize("name", ["full", "kivi", "ojakv", "snapkv", "xkv", "momentkv", "minicache", "shadowkv"])
def test_chunks_of_any_size_are_exact(name, chunk):
    assert_exact(answers(exact_configuration(REGISTRY[name]), WINDOWED, chunk), exact_answers(WINDOWED))


VARIANTS = [
    "ojakv:rank=1.0,recent_of=prompt,sinks=3", "static-pca-h:rank=1.0,heads=joint,decoded=exact,sinks=2,recent=0",
    "single-svd:rank=1.0,rope=post,heads=per_head,decoded=coded,sinks=1,recent=2",
    "xkv:rank=1.0,group=2,recompress=16,sinks=4,recent=8",
    "kivi:bits=none,sinks=4,recent=8+snapkv:keep=1.0,decoding=keep", "single-svd:rank=1.0,heads=per_head+adakv:keep=1.0",
    "snapkv:keep=1.0,sinks=4,recent=8,positions=cache+moments",
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", VARIANTS)
def test_variants_are_exact_in_chunks(spec):
    assert_exact(answers(parse_method(spec), TWO, CHUNK), exact_answers())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(methods()))
def test_caches_are_of_the_same_shape_and_count(name):
    """Behind a prompt in chunks a cache is what it is behind a whole one, with as many tokens of each kind."""
    method = small_configuration(REGISTRY[name])
    whole, _ = prefilled(method, WINDOWED, None)
    parts, logits = prefilled(method, WINDOWED, CHUNK)
    assert np.isfinite(logits).all() and shapes_of(parts) == shapes_of(whole)
    rounded = getattr(getattr(method, "selection", method), "allocation", None) == "official"  # by half a token a head
    for (path, one, _), (_, other, _) in zip(walk(parts), walk(whole), strict=True):
        if path.endswith("length"):
            np.testing.assert_allclose(one, other, atol=PLAIN.kv_heads if rounded else 0, err_msg=path)


@pytest.mark.parametrize("spec", [
    "snapkv:keep=0.25,sinks=4,recent=8", pytest.param("momentkv:keep=0.25,sinks=4,recent=8", marks=pytest.mark.slow)])
def test_a_row_of_one_chunk_beside_a_longer_one_has_the_votes_of_a_whole_prompt(spec):
    """Those that pooling lends to the first tokens of its window, too: what is evicted later hangs on them."""
    whole, parts = (prefilled(parse_method(spec), ONE, chunk)[0].groups[0] for chunk in (None, CHUNK))
    assert float(whole.near_votes[1, :, 4:].max()) > 0
    np.testing.assert_allclose(parts.near_votes[1], whole.near_votes[1], atol=1e-6)


def test_one_chunk_is_the_whole_prompt():
    method = parse_method("ojakv:sinks=4,recent=8+snapkv:budget=24,recent=8")
    for one, other in zip(*(jax.tree.leaves(prefilled(method, ONE, chunk)) for chunk in (None, PROMPT)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("spec", [
    "h2o:keep=1.0,sinks=4,recent=8", pytest.param("snapkv:keep=1.0,sinks=4,recent=8,pool=none", marks=pytest.mark.slow)])
def test_votes_add_up_to_those_of_the_whole_prompt(spec):
    """Where nothing has to leave, the scores that decoding begins with are those of a whole prompt."""
    method = parse_method(spec)
    (whole, _), (parts, _) = (prefilled(method, ONE, chunk) for chunk in (None, CHUNK))
    one, other = whole.groups[0], parts.groups[0]
    for name, length in (("near_votes", one.ends[0].length), ("far_votes", one.store.tokens.length)):
        x, y = (np.asarray(getattr(state, name)) for state in (one, other))
        held = np.arange(x.shape[2]) < np.asarray(length)[:, None, None]
        np.testing.assert_allclose(np.where(held, x, 0), np.where(held, y, 0), atol=1e-4, err_msg=name)


@dataclasses.dataclass(frozen=True)
class LongValues(Budgeted):
    """Scores that no query has a part in."""

    decoding: str = "keep"
    name = "long-values"

    def prompt_scores(self, layout, tap, lengths):
        return (tap.v**2).sum(-1).swapaxes(1, 2)


def test_a_rule_without_queries_chooses_the_same_tokens_chunk_by_chunk():
    method = LongValues(budget=30, sinks=4, recent=8)
    (whole, _), (parts, _) = (prefilled(method, ONE, chunk) for chunk in (None, CHUNK))
    assert shapes_of(whole) == shapes_of(parts)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


shared = jax.jit(Neighbours.shared, static_argnums=0)


@pytest.mark.parametrize("pool, kernel, chunk", [("avg", 5, 1), ("max", 4, 1), ("none", 1, 4), ("avg", 3, 4)])
def test_neighbours_without_gaps_are_those_of_a_whole_prompt(pool, kernel, chunk):
    votes = jnp.asarray(np.random.default_rng(0).random((2, 3, 24)), jnp.float32)
    position = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), votes.shape)
    found = shared(Neighbours(pool, kernel, chunk), votes, position, None, jnp.ones(votes.shape, bool))
    np.testing.assert_allclose(found, chunked(pooled(votes, pool, kernel), chunk), atol=1e-6)


@pytest.mark.parametrize("heads", [1, 2])
def test_new_tokens_are_neighbours_of_stored_ones(heads):
    """Between them lie the store's free slots, and where heads are packed the tokens of others."""
    rng, stored, new = np.random.default_rng(0), np.arange(10), np.arange(10, 16)
    position = np.concatenate([np.tile(stored, heads), np.zeros(5), np.tile(new, heads)]).astype(np.int32)[None, None]
    owner = np.concatenate([np.repeat(np.arange(heads), 10), np.zeros(5), np.repeat(np.arange(heads), 6)])
    owner, valid = owner.astype(np.int8)[None, None], np.ones(position.shape, bool)
    valid[..., 10 * heads : 10 * heads + 5] = False
    votes = rng.random(position.shape).astype(np.float32)
    rule = Neighbours("avg", 3, 4)
    found = np.asarray(shared(rule, votes, position, owner, valid))
    for head in range(heads):
        mine = valid & (owner == head)
        alone = [x[mine][None, None] for x in (votes, position)]
        np.testing.assert_allclose(found[mine], shared(rule, *alone, None, np.ones((1, 1, 16), bool))[0, 0], rtol=1e-6)


def test_neighbours_that_are_gone_lend_nothing():
    """Packed heads lie behind each other: the last token of one is no neighbour of the first of the next."""
    votes, owner = jnp.array([[[1.0, 2.0, 4.0, 8.0]]]), jnp.array([[[0, 0, 0, 1]]], jnp.int8)
    position = jnp.array([[[3, 4, 7, 8]]], jnp.int32)
    found = shared(Neighbours("avg", 3), votes, position, owner, jnp.ones(votes.shape, bool))
    np.testing.assert_allclose(found[0, 0], np.array([3.0, 3.0, 4.0, 8.0]) / 3, atol=1e-6)


# ---- a second reading -----------------------------------------------------------------------------------------------


def test_copies_of_a_chunk_see_what_was_before():
    """Attention and votes beside NumPy's, where the past is a partial and its first tokens are sinks."""
    rng, (before, size, heads, dim) = np.random.default_rng(0), (11, 9, 4, 8)
    q, k, v = (rng.normal(size=(1, before + 2 * size, n, dim)).astype(np.float32) for n in (heads, 2, 2))
    copies = slice(before + size, None)

    def logits(rows):
        keys = np.repeat(k, 2, axis=2)
        s = np.einsum("tnd,snd->nts", q[0, rows], keys[0]) * 0.3
        t, at = np.arange(size), np.arange(before + 2 * size)
        return np.where((at[None] < before + size) | (at[None] - before - size <= t[:, None]), s, -np.inf)

    s = logits(copies)
    weights = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    out = np.einsum("nts,snd->tnd", weights, np.repeat(v, 2, axis=2)[0])
    near = (np.arange(s.shape[-1]) < SINKS) | (np.arange(s.shape[-1]) >= before)
    shared = np.where(near, np.exp(s), 0)
    shared = shared / shared.sum(-1, keepdims=True)
    votes = shared[..., before : before + size].reshape(2, -1, size).max(1)

    past = np.exp(s[..., :before])
    part = AttnPartial(
        jnp.asarray(np.einsum("nts,snd->tnd", past / past.sum(-1, keepdims=True), np.repeat(v, 2, 2)[0, :before])[None],
                    jnp.float32),
        jnp.asarray(np.log(past.sum(-1)).T[None], jnp.float32),
    )
    sinks = jnp.asarray(np.log(past[..., :SINKS].sum(-1)).T[None], jnp.float32)
    lengths = jnp.array([size], jnp.int32)
    found, got = reread_attention(
        q[:, copies], k[:, before:], v[:, before:], lengths, scale=0.3, window=None,
        past=Past(part, sinks, jnp.array([before], jnp.int32)),
    )
    np.testing.assert_allclose(found[0], out, atol=1e-5)
    np.testing.assert_allclose(got[0], votes, atol=1e-5)
    assert int(reread_positions(lengths + before, size)[0, 0]) == before + size


# ---- programs and memory --------------------------------------------------------------------------------------------


def test_all_chunks_share_their_programs():
    """However many chunks a prompt has; the number of a chunk is no part of a program."""
    method = parse_method("kivi:sinks=4,recent=8")
    prefilled(method, ONE, 24)
    before = layer_read._cache_size(), ingest_group._cache_size()
    long = jnp.zeros((2, PROMPT), jnp.int32)
    for lengths in ([96, 96], [96, 25], [49, 96]):
        prefill(method, ONE, model(ONE).params, long, jnp.array(lengths), capacity=CAPACITY, block=16,
                dtype=jnp.float32, chunk=24)
    assert (layer_read._cache_size(), ingest_group._cache_size()) == before


def memory_of_a_chunk(spec, prompt, chunk=64):
    """Bytes of arguments and of temporaries of the program of a chunk, and those of the cache."""
    method, config = parse_method(spec), dataclasses.replace(ONE, context=1 << 15)
    tokens, lengths = jnp.zeros((1, prompt), jnp.int32), jnp.array([prompt])
    layout = lkv.generation.forward.make_layout(config, 1, prompt, prompt + 64, 32, "float32")
    params, bases = model(config).params, bases_for(method, config)

    def begin():
        return lkv.generation.forward.begin_prefill(
            method, config, params, layout, tokens[:, :chunk], lengths, bases=bases, goes_on=True)

    def step(cache, tokens, counts, last):
        return chunks.read_chunk(method, config, params, cache, tokens, counts, last, bases=bases, of_prompt=True)

    cache, last = jax.eval_shape(begin)
    counts = jax.ShapeDtypeStruct((1,), jnp.int32)
    piece = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    found = jax.jit(step, donate_argnums=0).lower(cache, piece, counts, last).compile().memory_analysis()
    return found.temp_size_in_bytes, found.argument_size_in_bytes, lkv.cache_bytes(cache).total


@pytest.mark.slow
def test_memory_of_a_chunk_does_not_grow_with_the_prompt():
    """At a budget in tokens nothing does; where all tokens are coded, temporaries grow by no more than the cache does."""
    short, long = (memory_of_a_chunk("snapkv:budget=48,sinks=4,recent=8,window=8", n) for n in (256, 4096))
    assert short == long
    short, long = (memory_of_a_chunk("kivi:sinks=4,recent=8", n) for n in (1024, 4096))  # attention reads blocks of 512
    growth = long[2] - short[2]
    assert long[1] - short[1] == growth and long[0] - short[0] <= growth


# ---- turns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [pytest.param("full", marks=pytest.mark.slow), "kivi:bits=none,sinks=4,recent=8"])
def test_a_turn_in_chunks_of_any_size_is_exact(spec):
    """Rows of different lengths, one of them within the first chunk."""
    method, params = parse_method(spec), model(ONE).params
    turn = [row.tolist() for row in np.asarray(text(ONE)[:, PROMPT : PROMPT + 37])]
    turn[1] = turn[1][:5]
    found = []
    for chunk in (None, 20, 64):
        cache, _ = prefilled(method, ONE, None)
        cache, logits = lkv.ingest(method, ONE, params, cache, turn, chunk=chunk)
        _, after = extend(method, ONE, params, cache, jnp.array([[3], [5]]))
        found.append(np.stack([np.asarray(logits), np.asarray(after)], axis=1))
    for other in found[1:]:
        assert_exact(other, found[0])


def test_a_turn_in_chunks_is_of_the_model_that_the_cache_is_of():
    other = dataclasses.replace(ONE, rope=dataclasses.replace(ONE.rope, theta=500.0))
    cache, _ = prefilled(REGISTRY["full"](), ONE, None)
    with pytest.raises(ValueError, match="made for another model"):
        lkv.ingest("full", other, model(ONE).params, cache, [[1, 2, 3]] * 2, chunk=32)


@pytest.mark.parametrize("chunk", [0, 1.5])
def test_a_chunk_has_tokens(chunk):
    with pytest.raises(ValueError, match=f"chunk={chunk}"):
        prefilled(REGISTRY["full"](), ONE, chunk)
    with pytest.raises(ValueError, match=f"prefill_chunk={chunk}"):
        lkv.generate(model(ONE), "full", [[1, 2]], prefill_chunk=chunk, max_new_tokens=1)
