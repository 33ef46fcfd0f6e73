"""Caches that select: what never leaves, positions, bytes, compositions and mistakes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import SPEC, check_ends, drive, kept_positions, make_stream, softmax
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, model, prompts, random_moments, run
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.attention.rope import RopeSpec, rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.estimators.moments import Sensitivity
from lowrank_kv_jax.generation.forward import decode_step, extend, prefill, refresh
from lowrank_kv_jax.generation.generate import Progress, decode_block
from lowrank_kv_jax.method import REGISTRY, Layout, Place, choice
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork, take_rows
from lowrank_kv_jax.methods import compose, machine_of
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.selections.pyramidkv import layer_budget
from lowrank_kv_jax.summaries.component import Summary

ENDS = "sinks=3,recent=6"
SELECTIONS = [
    f"h2o:budget=20,{ENDS}", f"scissorhands:budget=20,{ENDS}", f"snapkv:budget=20,{ENDS}", f"pyramidkv:budget=20,{ENDS}",
    f"adakv:budget=20,{ENDS}", f"momentkv:budget=20,{ENDS}", f"momentkv:budget=20,{ENDS},schedule=paper",
]
COMPOSITIONS = [
    "streamingllm:budget={budget}+moments:order=gaussian",
    pytest.param("h2o:budget={budget},recent=8+moments", marks=pytest.mark.slow),
    pytest.param("ojakv:rank=1.0,sinks=4,recent=8+snapkv:budget={budget},recent=8", marks=pytest.mark.slow),
    "ojakv:rank=1.0,sinks=4,recent=8+snapkv:budget={budget},recent=8+moments:order=0",
    "ojakv:rank=1.0,rope=pre,heads=joint,sinks=4,recent=8+h2o:budget={budget},recent=8+moments",
    pytest.param("static-pca-h:rank=1.0,sinks=2,recent=8+scissorhands:budget={budget},recent=8", marks=pytest.mark.slow),
]


# ---- the choice -----------------------------------------------------------------------------------------------------


SIZE = 16  # of what is drawn: one shape, compiled once
ranks, compact = jax.jit(choice.ranks, static_argnums=2), jax.jit(choice.compact, static_argnums=1)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=SIZE, max_size=SIZE))
def test_ranks_count_within_a_head(drawn):
    scores, owners = (np.array(x) for x in zip(*drawn, strict=True))
    got = ranks(jnp.asarray(scores, jnp.float32)[None], jnp.asarray(owners)[None], 3)[0]
    for head in range(3):
        mine = np.flatnonzero(owners == head)
        order = mine[np.argsort(-scores[mine], kind="stable")]
        np.testing.assert_array_equal(got[order], np.arange(len(mine)))


@given(st.lists(st.booleans(), min_size=SIZE, max_size=SIZE), st.sampled_from([1, 5, SIZE + 3]))
def test_compact_lists_chosen_slots_in_order(chosen, size):
    got = compact(jnp.asarray([chosen]), size)[0]
    want = np.flatnonzero(chosen)[:size]
    np.testing.assert_array_equal(got[: len(want)], want)


@pytest.mark.parametrize("budget, length, layers, want", [
    (96, 2000, 4, [188, 127, 66, 5]),  # min = 96 // 20 = 4, max = 188, step 61
    (96, 150, 4, [150, 114, 78, 42]),  # max is cut to the length, min = 2 * 96 - 150
    (40, 2000, 1, [78]),
])
def test_layer_budgets_by_hand(budget, length, layers, want):
    assert [layer_budget(budget, length, layer, layers) for layer in range(layers)] == want


@pytest.mark.parametrize("kind", ["random", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("giant", "ties"))])
def test_sinks_and_recent_tokens_are_never_evicted(kind):
    """Where one token is evicted a step; `test_eviction_oracles` checks the same of the rules that evict in bulk."""
    stream = make_stream(kind, 75, seed=1)
    state, _ = drive(parse_method(f"momentkv:budget=20,{ENDS},schedule=paper"), stream, 40, refresh_every=5)
    check_ends(state, stream, 3, 6)


@pytest.mark.parametrize("spec", [pytest.param("snapkv:budget=20", marks=pytest.mark.slow), "adakv:budget=20"])
def test_cache_positions_turn_keys_to_their_index(spec):
    """Whatever a head has lost, its keys stand at 0, 1, 2, ... and the query behind them, RoPE scaled as in Llama 3."""
    rope = RopeSpec(10000.0, 8, "llama3", 4.0, 1.0, 4.0, 16)
    stream = make_stream("random", 49, seed=2)
    q, k, v = (jnp.asarray(x[None], jnp.float32) for x in stream[:3])

    @jax.jit
    def turned(x, at):
        return rotate(x, *rope_angles(rope, jnp.asarray(at, jnp.int32)))

    where = jnp.arange(49)[None, :, None]
    rotated_q, rotated_k = turned(q, where), turned(k, where)
    taps = [Taps(*(x[:, cut] for x in (rotated_q, rotated_k, k, v, v[:, :, 0]))) for cut in (slice(48), slice(48, 49))]
    layout = Layout(dataclasses.replace(SPEC, rope=rope), 1, 48, 96, 8, "float32")
    method = parse_method(f"{spec},{ENDS},positions=cache")

    @jax.jit
    def after_one_step(prompt, new):
        at = jnp.asarray([[48]], jnp.int32)
        state = machine_of(method).compress(layout, None, machine_of(method).init(layout, None), (prompt,), at[0])
        state = machine_of(method).append(layout, None, state, new, jnp.ones((1,), jnp.int32), at, Place())
        return state, machine_of(method).attend(layout, None, state, new.q, at, Place()).out[0, 0]

    state, got = after_one_step(*taps)
    for head, selected in enumerate(kept_positions(state)):
        kept = np.array([0, 1, 2, *selected, *range(42, 49)])
        keys = np.asarray(turned(k[0, kept, head], np.arange(len(kept))))
        for n in (2 * head, 2 * head + 1):
            weights = softmax(keys @ np.asarray(turned(q[0, 48, n], len(kept) - 1)) / np.sqrt(8))
            np.testing.assert_allclose(got[n], weights @ stream.v[kept, head], atol=1e-4)


def test_a_head_that_keeps_fewer_tokens_stores_fewer():
    """One head attends to a few tokens, the other everywhere: the buffer is shared, not masked."""
    stream = make_stream("random", 64, seed=0)
    stream.k[:, 0] *= 4
    method = parse_method("adakv:budget=24,recent=8,alpha=0.0")
    state, _ = drive(method, stream, 64)
    counts = [len(x) for x in kept_positions(state)]
    assert sum(counts) == 2 * 16 and counts[0] != counts[1]
    assert state.store.tokens.k.shape == (1, 1, 2 * 16 + 1, SPEC.head_dim)


def test_pyramid_layers_have_their_own_shapes():
    layout = Layout(PLAIN.attention, 2, PROMPT, CAPACITY, BLOCK, "float32")
    groups = abstract_cache(parse_method("pyramidkv:budget=40,recent=8"), layout).groups
    sizes = [group.store.tokens.k.shape[2] for group in groups]
    assert sizes == [layer_budget(32, CAPACITY - 8, layer, 3) for layer in range(3)] and sizes[0] > sizes[2]


# ---- full budget, decoding ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spec", COMPOSITIONS)
def test_compositions_are_exact_at_full_budget_and_rank(spec):
    tokens = prompts(length=PROMPT + 24)
    _, exact = run(REGISTRY["full"](), PLAIN, tokens, PROMPT, width=4)
    _, logits = run(parse_method(spec.format(budget=CAPACITY)), PLAIN, tokens, PROMPT, width=4)
    np.testing.assert_allclose(logits, exact, atol=1e-4)
    cache, small = run(parse_method(spec.format(budget=24)), PLAIN, tokens, PROMPT, width=4)
    assert np.isfinite(small).all() and np.abs(small[:, 1:] - exact[:, 1:]).max() > 0.01
    assert cache_bytes(cache).total == sum(x.nbytes for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("spec", [
    "snapkv:budget=110,recent=8,decoding=keep",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "snapkv:keep=1.0,recent=8", "momentkv:budget=160,recent=8,schedule=paper", "adakv:budget=160,recent=8,positions=cache")),
])
def test_variants_are_exact_at_full_budget(spec):
    tokens = prompts(length=PROMPT + 24)
    _, exact = run(REGISTRY["full"](), PLAIN, tokens, PROMPT)
    _, logits = run(parse_method(spec), PLAIN, tokens, PROMPT)
    np.testing.assert_allclose(logits, exact, atol=1e-4)


def decode_many(config, method, steps, block=64, prompt=48):
    """Greedy decoding in compiled blocks; the cache after the first and after the last block."""
    cache, logits = prefill(
        method, config, model(config).params, prompts(rows=1, length=prompt), capacity=prompt + steps + block,
        block=block, dtype=jnp.float32,
    )
    progress = Progress(logits.argmax(-1).astype(jnp.int32), jnp.zeros((1,), bool), jnp.zeros((1,), bool))
    keys = jax.vmap(jax.random.key)(jnp.arange(1))
    first = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    for _ in range(steps // block):
        cache, progress, out = decode_block(method, config, model(config).params, cache, progress, keys, jnp.int32(block))
        assert (np.asarray(out) >= 0).all()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == first
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("spec, steps", [
    ("momentkv:budget=256", 10240),
    pytest.param("h2o:budget=256+moments:order=gaussian", 10240, marks=pytest.mark.slow),
])
def test_long_decoding_keeps_shapes_bytes_and_finiteness(spec, steps):
    config = dataclasses.replace(PLAIN, num_layers=1, windows=(None,), context=1 << 14)
    method = parse_method(spec)
    cache = decode_many(config, method, steps)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(cache))
    predicted = abstract_cache(method, cache.layout)
    assert cache_bytes(cache).by_kind == cache_bytes(predicted).by_kind
    (group,) = cache.groups
    evicted = np.asarray(group.gone[0].count)
    held = int(group.ends[0].length[0]) + (
        np.array([len(x) for x in kept_positions(group, PLAIN.kv_heads)]))
    np.testing.assert_array_equal(evicted[0] + held, 48 + steps)  # every token is held or summed up


# ---- bytes ----------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.sampled_from([s.replace("budget=20,", "") for s in SELECTIONS]), st.integers(30_000, 90_000))
def test_budget_in_bytes_is_kept_and_used(spec, budget):
    name, _, fields = spec.partition(":")
    method = parse_method(f"{name}:budget_bytes={budget},{fields}")
    layout = Layout(PLAIN.attention, 1, 512, 512, 16, "bfloat16")
    spent = cache_bytes(abstract_cache(method, layout)).total
    heads = PLAIN.attention.kv_heads * PLAIN.attention.num_layers
    assert spent <= budget and budget - spent < (20 + 20) * 2 * heads


@pytest.mark.parametrize("spec", ("adakv", "momentkv", "adakv:decoding=code", "snapkv", "single-svd:rank=0.5+adakv"))
@pytest.mark.parametrize("budget", (2_300_001, 2_621_440))
def test_budget_in_bytes_is_kept_by_stores_whose_slots_are_rounded_up(spec, budget):
    layout = Layout(PLAIN.attention, 1, 12_000, 12_100, 16, "bfloat16")
    method = parse_method(f"{spec}{',' if ':' in spec.split('+')[-1] else ':'}budget_bytes={budget}")
    spent = cache_bytes(abstract_cache(method, layout)).total
    assert 0.97 * budget < spent <= budget


@pytest.mark.parametrize("spec", (
    pytest.param("transform:bits=3,rope=post,heads=per_head,sinks=1,recent=4+pyramidkv", marks=pytest.mark.slow),
    "transform:bits=1.5,group=3,sinks=1,recent=4+pyramidkv", "transform:bits=3,sinks=1,recent=4+snapkv"))
def test_layers_of_different_widths_share_a_budget_in_bytes(spec):
    config = dataclasses.replace(PLAIN, num_layers=8, windows=(None,) * 8)
    moments, method = random_moments(config, group=3), parse_method(f"{spec}:sinks=1,recent=4,budget_bytes=1")
    costly = moments._replace(sensitivity=Sensitivity(*(x * np.geomspace(1e4, 1, 8)[:, None, None] for x in moments.sensitivity)))
    bases = method.fit(config.attention, costly)
    assert len({own.widths for own in bases}) > 2
    for budget in (45_000, 60_000, 80_000):
        method = parse_method(f"{spec}:sinks=1,recent=4,budget_bytes={budget}")
        spent = cache_bytes(abstract_cache(method, Layout(config.attention, 1, 512, 544, 16, "bfloat16"), bases)).total
        assert 0.9 * budget < spent <= budget, (budget, spent)


def test_statistics_positions_and_scores_are_counted():
    cache, _ = run(parse_method("momentkv:budget=24,recent=8"), PLAIN, prompts(), PROMPT)
    spent = cache_bytes(cache).by_kind
    layers, heads, dim = 3, 4, 8
    assert spent["moments"] == 2 * layers * heads * 4 * (dim * dim + 2 * dim + 1)
    slots = heads * 15 + 2  # budget - sink - recent, and room for the rounding of the official allocation
    tail = 1 + 8 + BLOCK
    assert spent["exact"] == 2 * layers * 2 * 4 * dim * (slots + heads * tail)
    # position 4, owner 1, score 4; scores of the tail; length and two gaps of the tail; length of the selected
    assert spent["indices"] == 2 * layers * (9 * slots + 4 * heads * tail + 4 * (1 + 4) + 4) + 2 * 8 + 4


# ---- composition and mistakes ---------------------------------------------------------------------------------------


def test_compose_and_plus_are_the_same():
    oja, snap, moments = parse_method("ojakv:rank=0.6"), parse_method("snapkv:keep=0.5"), Summary("0")
    method = compose(oja, snap, moments)
    assert method == parse_method("moments:order=0+snapkv:keep=0.5+ojakv:rank=0.6")
    assert hash(method) == hash(compose(oja, snap, moments)) and method.calibrated
    assert parse_method(spell_method(method)) == method
    assert spell_method(method) == "ojakv:rank=0.6+snapkv:keep=0.5+moments:order=0"
    assert compose(oja) is oja and compose(selection=snap) is snap
    assert method != compose(parse_method("ojakv:rank=1"), snap, moments)
    assert method.fit_key(PLAIN.attention) == oja.fit_key(PLAIN.attention)
    assert len(bases_for(method)) == 3


@pytest.mark.parametrize("text, message", [
    ("snapkv:budget=30", "budget=30: must exceed sinks + recent = 0 + 32"),
    ("momentkv:budget=33", "budget=33: must exceed sinks + recent = 1 + 32"),
    ("snapkv:budget=64,keep=0.5", "budget=64, keep=0.5: give exactly one of them"),
    ("h2o:budget=64,budget_bytes=4096", "budget=64, budget_bytes=4096: give exactly one"),
    ("snapkv:keep=1.5", "keep=1.5"),
    ("snapkv:budget=64,recent=-1", "recent=-1"),
    ("snapkv:pool=median", "pool='median': allowed are avg, max, none"),
    ("snapkv:recent=0", "the observation window is empty"),
    ("snapkv:group=never", "group='never'"),
    ("snapkv:decoding=drop", "decoding='drop': allowed are evict, keep, code"),
    ("snapkv:kernel=0", "kernel=0"),
    ("snapkv:decay=2.0", "decay=2.0"),
    ("snapkv:positions=none", "positions='none'"),
    ("adakv:allocation=fair", "allocation='fair'"),
    ("adakv:alpha=1.5", "alpha=1.5"),
    ("pyramidkv:beta=0", "beta=0"),
    ("scissorhands:history=0", "history=0"),
    ("momentkv:order=2", "order='2'"),
    ("momentkv:schedule=late", "schedule='late'"),
    ("momentkv:chunk=0", "chunk=0"),
    ("momentkv:schedule=paper,decoding=keep", "schedule='paper', decoding='keep': the paper's schedule evicts while "
                                              "decoding; allowed are decoding=evict, or schedule=block"),
    ("momentkv:paper,schedule=paper", "schedule='paper', decoding='keep'"),
    ("momentkv:prefill=guess", "prefill='guess': allowed are informed, literal"),
    ("momentkv:heads_by=guess", "heads_by='guess': allowed are informed, attention"),
    ("momentkv:moments_dtype=int8", "dtype='int8'"),
    ("snapkv:keep=0.5+h2o:keep=0.5", "snapkv and h2o are both a selection"),
    ("ojakv+single-svd", "ojakv and single-svd are both a codec"),
    ("moments+h2o+moments", "moments and moments are both a summary"),
    ("full+moments", "nothing is evicted"),
    ("moments", "nothing is evicted"),
    ("ojakv:rank=0.5+moments", "nothing is evicted; add a selection"),
    ("momentkv+moments", "keeps moments already"),
    ("momentkv:nc=false+moments:order=0", "give both the same order"),
    ("ojakv+streamingllm", "keeps no token between"),
    ("ojakv+snapkv:positions=cache", "positions='cache'"),
    ("snapkv+", "unknown method ''"),
])
def test_mistakes_are_named(text, message):
    with pytest.raises(ValueError) as error:
        parse_method(text)
    assert message in str(error.value)


@pytest.mark.parametrize("spec", [
    "momentkv:budget=40",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("snapkv:budget=44,sinks=1", "adakv:budget=44", "pyramidkv:budget=40")),
])
def test_a_prompt_shorter_than_the_window_votes_with_all_it_has(spec):
    """However it is padded."""
    found = []
    for width in (20, 64):
        tokens, lengths = jnp.zeros((2, width), jnp.int32).at[:, :20].set(prompts(length=20)), jnp.array([20, 7])
        cache, _ = prefill(spec, PLAIN, model().params, tokens, lengths, capacity=110, block=8, dtype="float32")
        found.append(extend(spec, PLAIN, model().params, cache, prompts(length=8, seed=1))[1])
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.parametrize("spec", ("snapkv", "kivi+pyramidkv"))
def test_too_few_bytes_are_refused(spec):
    """With the least that would do."""
    layout = Layout(PLAIN.attention, 1, 512, 544, 16, "bfloat16")
    with pytest.raises(ValueError, match="budget_bytes=1000: must be at least [0-9]+, which sinks") as refusal:
        abstract_cache(parse_method(f"{spec}:budget_bytes=1000"), layout)
    least = int(str(refusal.value).split("at least ")[1].split(",")[0])
    assert cache_bytes(abstract_cache(parse_method(f"{spec}:budget_bytes={least}"), layout)).total <= least
    with pytest.raises(ValueError, match=f"must be at least {least}"):
        abstract_cache(parse_method(f"{spec}:budget_bytes={least - 1}"), layout)


def test_only_selections_select():
    with pytest.raises(TypeError, match="is no selection"):
        compose(selection=parse_method("ojakv"))


@pytest.mark.slow
def test_rows_that_wait_keep_their_tokens_where_one_is_evicted_a_step():
    """Heads' budgets are rounded, some upwards: what a row holds beyond the mean is not its leave to evict."""
    method, params, rows = parse_method("momentkv:budget=22,recent=6,schedule=paper"), model().params, 12
    lengths = jnp.where(jnp.arange(rows) < 10, PROMPT, 5)  # some are shorter than what stays exact
    cache, _ = prefill(method, PLAIN, params, prompts(rows), lengths, capacity=CAPACITY, block=BLOCK, dtype=jnp.float32)
    active = jnp.arange(rows) % 2 == 0

    def answer(cache):  # of the rows that wait
        return decode_step(method, PLAIN, params, fork(cache), jnp.full(rows, 3))[1][1::2]

    before, first = jax.tree.leaves(take_rows(cache, range(1, rows, 2)).groups), answer(cache)
    for _ in range(4):
        cache, _ = decode_step(method, PLAIN, params, cache, jnp.full(rows, 7), active=active)
    for x, y in zip(before, jax.tree.leaves(take_rows(cache, range(1, rows, 2)).groups), strict=True):
        np.testing.assert_array_equal(x, y)
    cache = refresh(method, cache)
    np.testing.assert_allclose(answer(cache), first, atol=1e-6)
    np.testing.assert_array_equal(cache.length, lengths + 4 * active)
