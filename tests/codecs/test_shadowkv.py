"""ShadowKV: what is stored of a prompt, which pages a step reads, and what attention gives."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, PROMPT, model, prompts, softmax_attention

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.shadowkv import ShadowKV, outlier_pages
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Place, pages
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.storage.on_host import MEMORY, PLACES, OnHost
from lowrank_kv_jax.storage.state import walk

SPEC, PAGE, ENDS = PLAIN.attention, 8, {"sinks": 4, "recent": 8}
LENGTHS = (96, 61, 15)  # of stored tokens: 10 pages and a half, 6 whole ones and a token, none whole
ONE = jnp.ones((len(LENGTHS), 1), bool)  # a query a row, no padding
HEADS = SPEC.q_heads // SPEC.kv_heads


def rotated(x, positions):
    """RoPE in float64 of `[B, S, K, D]` at positions `[S]`."""
    angle = positions[:, None] * SPEC.rope.inverse_frequencies()
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@functools.cache
def prompt():
    """Keys before and after RoPE, and values, float64 `[B, S, K, D]`."""
    rng, scale = np.random.default_rng(0), np.linspace(2.0, 0.2, SPEC.head_dim)
    pre, v = (rng.normal(size=(len(LENGTHS), PROMPT, SPEC.kv_heads, SPEC.head_dim)) * scale for _ in range(2))
    return pre, rotated(pre, np.arange(PROMPT)), v


def query(seed):
    return np.random.default_rng(seed).normal(size=(len(LENGTHS), 1, SPEC.q_heads, SPEC.head_dim)) * 2


@functools.cache
def compressed(method):
    """The method, the layout and the state of the prompt."""
    machine, layout = machine_of(method), make_layout(PLAIN, len(LENGTHS), PROMPT, CAPACITY, 16, jnp.float32)
    bases = machine.group_bases(SPEC, None)[-1]
    pre, k, v = (jnp.asarray(x, jnp.float32) for x in prompt())
    taps = Taps(jnp.zeros((*k.shape[:2], SPEC.q_heads, SPEC.head_dim)), k, pre, v, jnp.zeros((*k.shape[:2], 1)))
    start = jax.jit(lambda taps: machine.compress(layout, bases, machine.init(layout, bases), (taps,), jnp.array(LENGTHS)))
    attend = jax.jit(
        lambda state, q: machine.attend(layout, bases, state, q, jnp.array(LENGTHS)[:, None], Place(0))
    )
    return machine, layout, start(taps), attend


# ---- an oracle, from the paper -------------------------------------------------------------------------------------


def expected(method, q, together=np.max):
    """Attention of one query a row, float64: the union of exact tokens, outliers and the pages that are chosen."""
    pre, k, v = prompt()
    seen, keys = np.zeros((*k.shape[:2], SPEC.kv_heads), bool), k.copy()
    for row, length in enumerate(LENGTHS):
        stored = np.arange(method.sinks, max(length - method.recent, method.sinks))
        parts = [stored[i : i + PAGE] for i in range(0, len(stored), PAGE)]
        whole = len(stored) // PAGE
        flat = pre[row, stored].reshape(len(stored), -1)
        basis = np.linalg.svd(flat, full_matrices=False)[2][: method.rank]
        rebuilt = rotated((flat @ basis.T @ basis).reshape(1, len(stored), *pre.shape[2:]), stored)[0]
        seen[row, : min(length, method.sinks)] = seen[row, max(length - method.recent, 0) : length] = True
        for head in range(SPEC.kv_heads):
            marks = [k[row, at, head].mean(0) for at in parts]
            cosine = [
                (k[row, at, head] @ mark / np.linalg.norm(k[row, at, head], axis=1) / np.linalg.norm(mark)).min()
                for at, mark in zip(parts, marks, strict=True)
            ]
            apart = np.argsort(cosine[:whole])[: method.outliers]
            rest = np.setdiff1d(np.arange(len(parts)), apart)
            keys[row, stored, head] = rebuilt[:, head]
            for i in apart:
                keys[row, parts[i], head], seen[row, parts[i], head] = k[row, parts[i], head], True
            if not len(rest):
                continue
            logits = q[row, 0, head * HEADS : (head + 1) * HEADS] @ np.array(marks)[rest].T * SPEC.scale
            share = together(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), axis=0)
            if rest[-1] == len(parts) - 1:
                share[-1] = np.inf
            for i in rest[np.argsort(-share)[: method.budget // PAGE]]:
                seen[row, parts[i], head] = True
    one = [
        softmax_attention(q[:, :, head * HEADS : (head + 1) * HEADS], keys[:, :, [head]], v[:, :, [head]],
                          seen[:, None, :, head], SPEC.scale)
        for head in range(SPEC.kv_heads)
    ]
    return tuple(np.concatenate(x, axis=2) for x in zip(*one, strict=True))


@pytest.mark.parametrize("outliers", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_attention_is_that_of_the_paper(outliers):
    """Landmarks, outliers, choice, rebuilt keys and attention; rows of their own length."""
    method = ShadowKV(rank=12, budget=3 * PAGE, keep=None, outliers=outliers, **ENDS)
    _, _, state, attend = compressed(method)
    for seed in range(3):
        q = query(seed)
        part = attend(state, jnp.asarray(q, jnp.float32))
        out, lse = expected(method, q)
        np.testing.assert_allclose(part.out, out, atol=1e-4)
        np.testing.assert_allclose(part.lse, lse, atol=1e-4)
    differing = [np.abs(expected(method, query(seed), np.sum)[0] - expected(method, query(seed))[0]).max() for seed in range(3)]
    assert max(differing) > 1e-2  # the rule by which query heads are put together shows


@pytest.mark.parametrize("outliers", [0, pytest.param(3, marks=pytest.mark.slow), 40])
def test_every_page_read_at_full_rank_is_exact(outliers):
    method = ShadowKV(rank=1.0, keep=1.0, outliers=outliers, **ENDS)
    _, _, state, attend = compressed(method)
    q, (_, k, v) = query(0), prompt()
    part = attend(state, jnp.asarray(q, jnp.float32))
    there = np.arange(PROMPT) < np.array(LENGTHS)[:, None]
    out, lse = softmax_attention(q, k, v, there[:, None], SPEC.scale)
    np.testing.assert_allclose(part.out, out, atol=2e-5)
    np.testing.assert_allclose(part.lse, lse, atol=2e-5)


def test_a_query_reads_the_page_of_its_key_and_each_head_its_own():
    method = ShadowKV(rank=12, budget=2 * PAGE, keep=None, outliers=2, **ENDS)
    machine, _, state, _ = compressed(method)
    apart = machine.codec.apart(state.store)
    left_out = (np.asarray(apart)[0, :, :, None] == np.arange(10)).any(1)[..., None]
    marks = np.where(left_out, 0, np.asarray(state.marks[0].k)[0, :, :10])
    longest = np.take_along_axis(marks, np.linalg.norm(marks, axis=-1).argmax(1)[:, None, None], axis=1)[:, 0]
    chosen = []
    for sign in (20, -20):
        aimed = np.repeat(sign * longest, HEADS, axis=0)[None, None]
        q = jnp.asarray(np.broadcast_to(aimed, (len(LENGTHS), *aimed.shape[1:])), jnp.float32)
        found = pages.choose(machine.standing_reading, state.marks[0], state.store.tokens.length, q, ONE, 4, 2, apart, scale=1.0)
        chosen.append(np.asarray(found.pages)[0])
        best = (sign * np.einsum("kcd,kd->kc", marks, longest)).argmax(1)
        assert chosen[-1][:, 0].tolist() == best.tolist() and (chosen[-1][:, 1] == 10).all()
    assert (chosen[0][:, 0] != chosen[1][:, 0]).all() and len(set(chosen[0][:, 0])) > 1


def test_outliers_are_never_chosen_and_missing_pages_have_the_number_of_all():
    method = ShadowKV(rank=12, keep=1.0, outliers=3, **ENDS)
    machine, _, state, _ = compressed(method)
    apart = machine.codec.apart(state.store)
    q = jnp.asarray(query(0), jnp.float32)
    found = pages.choose(machine.standing_reading, state.marks[0], state.store.tokens.length, q, ONE, 4, 11, apart, scale=1.0)
    for row, there in enumerate((11, 7, 1)):  # 11 pages are whole or begun in the longest row
        for head in range(SPEC.kv_heads):
            own = np.setdiff1d(np.arange(there), apart[row, head])
            assert found.pages[row, head].tolist() == own.tolist() + [11] * (11 - len(own))
    assert (np.asarray(apart) < 11).sum(2).tolist() == [[3] * 4, [3] * 4, [0] * 4]
    assert found.tokens.tolist() == (state.store.tokens.length - PAGE * jnp.array([3, 3, 0])).tolist()


def test_an_outlier_is_the_page_with_a_key_that_points_elsewhere():
    k = np.ones((1, 24, 1, 4))
    k[0, 13] = -1
    k[0, 3] *= 1000  # as long as it may be
    assert outlier_pages(jnp.asarray(k), jnp.array([24]), 8, 2, 3)[1][0, 0, 0] == 1
    assert outlier_pages(jnp.asarray(k), jnp.array([15]), 8, 2, 3)[1][0, 0].tolist() == [0, 3]  # of the second one is missing


def test_bytes_are_those_of_coefficients_values_landmarks_and_outliers():
    rank, size, pages_there, outliers = 12, 88, 11, 3  # 84 stored tokens in whole pages
    method = ShadowKV(rank=rank, budget=3 * PAGE, keep=None, outliers=outliers, **ENDS)
    _, _, state, _ = compressed(method)
    width, rows = SPEC.kv_heads * SPEC.head_dim, len(LENGTHS)
    by_name = {path: x.nbytes for path, x, _ in walk((state.store, state.marks))}
    assert by_name["0.tokens.k"] == 4 * rows * size * rank and by_name["0.tokens.v"] == 4 * rows * size * width
    assert by_name["0.basis"] == 4 * rows * width * rank and by_name["1.0.k"] == 4 * rows * pages_there * width
    assert by_name["0.outliers.k"] == by_name["0.outliers.v"] == 4 * rows * outliers * PAGE * width
    assert "exact" in {info.kind for path, _, info in walk(state.store) if path == "tokens.v"}


# ---- values on the host ----------------------------------------------------------------------------------------------


def placed(state):
    return {path for path, x, _ in walk(state) if isinstance(x, OnHost) and x.sharding.memory_kind == MEMORY}


def test_values_on_the_host_stay_there_and_give_the_same():
    methods = [ShadowKV(rank=12, budget=3 * PAGE, keep=None, outliers=3, values=place, **ENDS) for place in PLACES]
    q, results = jnp.asarray(query(0), jnp.float32), []
    for method in methods:
        machine, layout, state, attend = compressed(method)
        results.append(attend(state, q))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert placed(state) == {"store.tokens.v"}
    new = Taps(q, *(jnp.ones((3, 1, SPEC.kv_heads, SPEC.head_dim)),) * 3, jnp.zeros((3, 1, 1)))
    step = jax.jit(
        lambda state: machine.append(layout, None, state, new, jnp.ones(3, jnp.int32), None, Place(0)), donate_argnums=0
    )
    assert placed(step(state)) == {"store.tokens.v"}


@pytest.mark.parametrize("compress", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_conversation_with_values_on_the_host(compress, tmp_path):
    """In bfloat16, which a CPU holds as bits: disk, forks, rows, a second turn, and bytes."""
    config = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
    named = types.SimpleNamespace(name="tiny", fingerprint="f" * 64, config=config, params=model(config).params, tokenizer=None)
    method = ShadowKV(rank=12, budget=3 * PAGE, keep=None, outliers=3, values="host", **ENDS)
    first, _ = lkv.prefill(method, config, named.params, prompts(2), jnp.array([96, 61]), capacity=CAPACITY)
    lkv.save_cache(tmp_path / "cache", first, named, compress=compress)
    again = lkv.load_cache(tmp_path / "cache", method, named)
    swapped = lkv.take_rows(lkv.fork(again, 2), [3, 0])
    cache = lkv.insert_rows(lkv.take_rows(swapped, [1]), lkv.take_rows(swapped, [0]))
    chex.assert_trees_all_equal_structs(cache, first)
    chex.assert_trees_all_equal(cache, first)
    size, values = lkv.cache_bytes(cache), cache.groups[0].store.tokens.v
    assert size == lkv.cache_bytes(first) and size.on_host == values.nbytes
    turn = lkv.generate(named, method, [[3, 1, 4], [2, 7]], cache=cache, max_new_tokens=3, stop_at_eos=False)
    assert all(len(row) == 3 for row in turn.tokens)
    assert placed(cache) == placed(turn.cache) == {"groups.0.store.tokens.v"}


def test_values_need_a_memory_on_the_host(monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.codecs.shadowkv.has_host_memory", lambda: False)
    with pytest.raises(ValueError, match="values='host'.*pinned_host.*allowed is device"):
        parse_method("shadowkv:values=host").validate(SPEC)


def test_the_paper_is_a_preset():
    method = parse_method("shadowkv:paper")
    assert (method.rank, method.budget, method.page, method.outliers, method.recent) == (160, 2048, 8, 48, 32)
    assert parse_method(spell_method(method)) == method


@pytest.mark.parametrize("spec, message", [
    ("shadowkv:rank=0", "rank=0"), ("shadowkv:page=0", "page=0"), ("shadowkv:outliers=-1", "outliers=-1"),
    ("shadowkv:keep=1.5", "keep=1.5"), ("shadowkv:budget=none", "give exactly one"), ("shadowkv:budget=0", "budget=0"),
    ("shadowkv:values=disk", "values='disk': allowed are device, host"),
    ("shadowkv+quest", "one by one"), ("shadowkv+snapkv", "one by one"),
])
def test_bad_input_is_told(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)


def test_more_columns_than_channels_are_refused():
    with pytest.raises(ValueError, match="rank=160.*1..32"):
        parse_method("shadowkv:paper").validate(SPEC)
