"""Pages: which tokens a step reads of those that are stored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, PROMPT, attend, compress, model, prompts, run, softmax_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import extend, make_layout, prefill
from lowrank_kv_jax.method import Place, pages
from lowrank_kv_jax.method.cache import fork
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.selections.landmarks import Landmarks
from lowrank_kv_jax.selections.quest import Quest
from lowrank_kv_jax.storage.quantised import read_basis, read_tokens

SPEC = PLAIN.attention
ONE = jnp.ones((2, 1), bool)  # a query a row, no padding

add = jax.jit(lambda reading, *args: reading.add(*args), static_argnums=0)
logits_of = jax.jit(lambda reading, *args: reading.logits(*args), static_argnums=0)
choose = jax.jit(pages.choose, static_argnums=(0, 5, 6, 7))


def test_quest_reads_the_pages_whose_bounds_are_highest():
    """Bounds, choice and attention of each kv head in float64; rows of their own length."""
    rng, lengths, page, sinks, recent, count = np.random.default_rng(0), (96, 71), 8, 4, 8, 4
    method = machine_of(Quest(budget=count * page, keep=None, page=page, sinks=sinks, recent=recent))
    layout = make_layout(PLAIN, 2, PROMPT, 160, 16, jnp.float32)
    q, k, v = (rng.normal(size=(2, PROMPT, heads, 8)) for heads in (8, 4, 4))
    taps = Taps(*(jnp.asarray(x, jnp.float32) for x in (q, k, k, v)), jnp.zeros((2, PROMPT, 1)))
    bases = method.group_bases(SPEC, None)[-1]
    state = compress(method, layout, bases, (taps,), jnp.array(lengths))
    new = rng.normal(size=(2, 1, 8, 8))
    positions = jnp.array(lengths)[:, None]
    part = attend(method, layout, bases, state, jnp.asarray(new, jnp.float32), positions)

    seen = np.zeros((2, 4, PROMPT), bool)
    for row, length in enumerate(lengths):
        stored = np.arange(sinks, length - recent)
        there = [stored[i : i + page] for i in range(0, len(stored), page)]
        seen[row, :, :sinks] = seen[row, :, length - recent : length] = True
        for head in range(4):
            bound = np.array([
                [np.maximum(one * k[row, at, head].min(0), one * k[row, at, head].max(0)).sum() for at in there]
                for one in new[row, 0, 2 * head : 2 * head + 2]
            ]) * SPEC.scale
            share = (np.exp(bound) / np.exp(bound).sum(1, keepdims=True)).sum(0)
            for i in [len(there) - 1, *np.argsort(-share[:-1])[: count - 1]]:
                seen[row, head, there[i]] = True
    for head in range(4):
        mine = slice(2 * head, 2 * head + 2)
        out, lse = softmax_attention(new[:, :, mine], k[:, :, [head]], v[:, :, [head]], seen[:, None, head], SPEC.scale)
        np.testing.assert_allclose(part.out[:, :, mine], out, atol=1e-5)
        np.testing.assert_allclose(part.lse[:, :, mine], lse, atol=1e-5)


def test_codes_are_rebuilt_of_the_chosen_pages_alone():
    """xKV's own reading: one choice for all heads, which share coefficients."""
    method = parse_method("xkv:group=1,rank_k=12,rank_v=12,sinks=4,recent=4,rebuild=40,rebuild_block=16,bits=8")
    lengths = jnp.array([96, 71])
    cache, _ = prefill(method, PLAIN, model().params, prompts(), lengths, capacity=160, dtype=jnp.float32)
    layout, state, machine = cache.layout, cache.groups[0], machine_of(method)
    q = jax.random.normal(jax.random.key(0), (2, 1, 8, 8))
    chosen = jax.jit(lambda state, q: pages.read(machine, layout, state, q, lengths[:, None] - 1, Place(0)))(state, q)
    part = attend(machine.codec, layout, None, chosen, q, lengths[:, None])
    reading, tokens = machine.standing_reading, state.store.tokens
    chosen = np.asarray(choose(reading, state.marks[0], tokens.length, q, ONE, 1, 3, scale=SPEC.scale).pages)[:, 0]
    assert (np.diff(chosen) > 0).all() and chosen[0].tolist() != chosen[1].tolist()
    keys, values = (
        jnp.einsum("bjsr,bjwr->bsjw", read_tokens(c), read_basis(u)).reshape(2, 96, 4, 8)
        for c, u in ((tokens.k, state.store.k_basis), (tokens.v, state.store.v_basis))
    )
    slots = np.arange(96)
    keys = rotate(keys, *(table[:, :, None] for table in rope_angles(SPEC.rope, jnp.broadcast_to(slots + 4, (2, 96)))))
    mask = np.stack([np.isin(slots // 16, own) & (slots < n) for own, n in zip(chosen, tokens.length, strict=True)])
    out, lse = softmax_attention(q, keys, values, mask[:, None], SPEC.scale)
    np.testing.assert_allclose(part.out, out, atol=1e-4)
    np.testing.assert_allclose(part.lse, lse, atol=1e-4)


@pytest.mark.parametrize("reading", [Quest(page=5), Landmarks(page=5)], ids=["bounds", "means"])
@settings(max_examples=15)
@given(pieces=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_marks_grow_with_the_tokens_that_come(reading, pieces, seed):
    """Bounds and means of what each row holds, however it came."""
    layout = make_layout(PLAIN, 2, 8, 64, 8, jnp.float32)
    marks, start = reading.empty(layout, 6), np.zeros(2, np.int32)
    held = [np.zeros((0, 4, 8)), np.zeros((0, 4, 8))]
    rng = np.random.default_rng(seed)
    for counts in pieces:
        k = rng.normal(size=(2, 7, 4, 8))
        marks = add(reading, marks, k.astype(np.float32), start, np.array(counts, np.int32))
        start = start + np.array(counts, np.int32)
        held = [np.concatenate([old, new[:n]]) for old, new, n in zip(held, k, counts, strict=True)]
    q = rng.normal(size=(2, 4, 3, 8))
    found = np.asarray(logits_of(reading, marks, q.astype(np.float32)))
    for row, k in enumerate(held):
        for i in range(-(-len(k) // 5)):
            logits = np.einsum("kmd,skd->kms", q[row], k[5 * i : 5 * i + 5])
            if isinstance(reading, Landmarks):
                np.testing.assert_allclose(found[row, :, :, i], logits.mean(-1), atol=1e-4)
            else:
                assert (found[row, :, :, i] >= logits.max(-1) - 1e-4).all()


def test_a_query_finds_the_page_of_its_key_and_no_page_without_tokens():
    k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 4, 8)), jnp.float32)
    reading, layout = Landmarks(page=16), make_layout(PLAIN, 2, 64, 96, 8, jnp.float32)
    marks = add(reading, reading.empty(layout, 5), k, jnp.zeros(2, jnp.int32), jnp.array([64, 64]))
    q = 20 * jnp.repeat(marks.k[:, :, 2], 2, axis=1)[:, None]
    assert (choose(reading, marks, jnp.array([64, 64]), q, ONE, 4, 2, scale=1.0).pages == jnp.array([2, 3])).all()
    assert (choose(reading, marks, jnp.array([30, 64]), q, ONE, 1, 2, scale=1.0).pages[0] == jnp.array([0, 1])).all()


@pytest.mark.parametrize("spec", [
    "quest:budget=8,keep=none,page=4,sinks=2,recent=4,dense_layers=0", "xkv:group=1,sinks=4,recent=8,rebuild=8,rebuild_block=4",
    pytest.param("shadowkv:budget=8,keep=none,page=4,sinks=2,recent=4,outliers=0", marks=pytest.mark.slow),
])
def test_padding_asks_for_no_page(spec):
    """A token alone, and with others behind it that do not count, whatever they are."""
    config = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
    method, params = parse_method(spec), model(config).params
    cache, _ = prefill(method, config, params, prompts(), capacity=160, block=32, dtype=jnp.float32)
    new, one = np.array([[7], [3]]), np.array([1, 1])
    alone = extend(method, config, params, fork(cache), new)[1]
    for padding in (0, 50):
        padded = np.pad(new, ((0, 0), (0, 31)), constant_values=padding)
        np.testing.assert_allclose(extend(method, config, params, fork(cache), padded, one)[1], alone, atol=1e-4)


@pytest.mark.parametrize("codec", [
    "static-pca-h:rank=1.0,heads=joint+",
    *(pytest.param(codec, marks=pytest.mark.slow) for codec in (
        "", "kivi:bits=8+", "palu:rank=1.0+", "transform:bits=3,sinks=4,recent=8+",
        "transform:bits=3,heads=per_head,rope=post,steps=prompt,sinks=4,recent=8+",
        "transform:bits=3,kv=joint,sinks=4,recent=8+",
    )),
])
def test_pages_stand_before_any_codec_of_one_token_at_a_time(codec):
    """Everything read is the codec alone; half of it is something else, and few tokens before a sliding window change nothing."""
    tokens = prompts(length=PROMPT + 20)
    config = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
    ends = "" if codec else ",sinks=4,recent=8"
    spec = f"{codec}quest:{{}},page=4,dense_layers=0{ends}"
    whole = run(parse_method(codec.rstrip("+") or "full"), config, tokens, PROMPT)[1]
    same = run(parse_method(spec.format("keep=1.0")), config, tokens, PROMPT)[1]
    most, half = (run(parse_method(spec.format(f"budget={n}")), config, tokens, PROMPT)[1] for n in (120, 40))
    np.testing.assert_allclose(same, whole, atol=2e-5)
    np.testing.assert_allclose(most, whole, atol=2e-5)  # of pages that are taken one by one
    assert np.abs(half - whole).max() > 1e-3
    method = parse_method(spec.format("budget=40"))
    assert parse_method(spell_method(method)) == method


@pytest.mark.parametrize("spec, message", [
    ("quest:budget=0", "budget=0"), ("quest:page=0", "page=0"), ("quest:keep=1.5", "keep=1.5"),
    ("quest:keep=none", "give exactly one"), ("snapkv+quest", "pages are made of"), ("osp+quest", "one by one"),
    ("xkv:rebuild=8+quest", "given twice"), ("quest+quest", "both a reading"),
])
def test_bad_input_is_told(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)
