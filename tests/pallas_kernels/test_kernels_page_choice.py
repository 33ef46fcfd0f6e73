"""Pages by the Triton kernels, interpreted: their logits, the choice, and whole steps, which read what XLA's read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps_by_backend import steps_by_backend

from lowrank_kv_jax.attention.partial import merge
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to, coefficient_attention
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.page_choice import gpu_choice, gpu_logits
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.pages_in_rows import ChosenPages
from lowrank_kv_jax.storage.positions import OfPages, PerHead, Runs

SCALE = 0.3


def wanted(logits, length, apart, count, page, together):
    """The pages of one unit by its heads' logits `[N, C]`, in float64, and how many tokens they hold."""
    size = logits.shape[1]
    there = np.setdiff1d(np.arange(-(-length // page)), apart)
    weights = np.exp(SCALE * (logits[:, there].astype(np.float64) - logits[:, there].max(1, initial=-np.inf, keepdims=True)))
    share = getattr(np, together)(weights / weights.sum(1, keepdims=True), axis=0)
    share[there == (length - 1) // page] = np.inf
    best = np.sort(there[np.argsort(-share, kind="stable")[:count]])
    tokens = np.minimum(page, length - best * page).sum()
    return best.tolist() + [size] * (count - len(best)), tokens


@pytest.mark.parametrize("pages, units, group, count, page, together, apart", [
    pytest.param(40, 4, 3, 7, 4, "sum", 0, marks=pytest.mark.newest), (130, 1, 2, 50, 16, "max", 3),
    (300, 2, 5, 300, 8, "max", 2), (256, 4, 1, 1, 8, "sum", 0)])
def test_a_unit_reads_the_pages_of_which_its_heads_make_most(pages, units, group, count, page, together, apart):
    """Rows that are full, end within a page, hold fewer pages than are wanted, one token and none; ties, and pages that no
    query wants. A page that is left out may be the last one, if it is whole."""
    rng, lengths = np.random.default_rng(pages), np.array([pages * page, pages * page - 3, page * 5 + 1, 1, 0], np.int32)
    logits = rng.integers(-9, 9, (len(lengths), 4, group, pages)).astype(np.float32)
    logits[0], logits[1, :, :, ::2] = 2, -3000
    left_out = np.full((len(lengths), units, apart), pages, np.int32)
    left_out[:3] = [[rng.permutation(5)[:apart] for _ in range(units)] for _ in range(3)]
    if apart:
        left_out[0, :, 0] = pages - 1
    found = gpu_choice.choose_pages(
        jnp.asarray(logits), jnp.asarray(lengths), jnp.asarray(left_out) if apart else None, units=units, queries=1,
        count=count, page=page, together=together, scale=SCALE, cap=None, interpret=True)
    for row, length in enumerate(lengths):
        for unit, own in enumerate(logits[row].reshape(units, -1, pages)):
            best, tokens = wanted(own, length, left_out[row, unit], count, page, together)
            assert found.pages[row, unit].tolist() == best and found.tokens[row] == tokens


@pytest.mark.parametrize("dtype, dim, group, bounds", [
    pytest.param("bfloat16", 24, 3, True, marks=pytest.mark.newest), ("float32", 160, 5, True), ("float16", 96, 20, False)])
def test_logits_are_those_of_float64(dtype, dim, group, bounds):
    """Of more pages than a program has, no multiple of them, and none without a token among them."""
    rng, pages = np.random.default_rng(dim), 2 * gpu_logits.TILE + 7
    q, *marks = (jnp.asarray(rng.normal(size=(2, 3, n, dim)), dtype) for n in (group, pages, pages))
    high, low = (jnp.maximum(*marks), jnp.minimum(*marks)) if bounds else (marks[0], marks[0])
    found = gpu_logits.page_logits(q, high, low if bounds else None, interpret=True)
    wide, top, bottom = (np.asarray(x, np.float64)[:, :, :, None] for x in (q, high, low))
    expected = np.maximum(wide * top.swapaxes(2, 3), wide * bottom.swapaxes(2, 3)).sum(-1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_what_registers_do_not_hold_and_more_queries_are_left_to_xla():
    lengths, options = jnp.ones(1, jnp.int32), dict(units=1, count=1, page=4, together="sum", scale=1.0, interpret=True)
    for pages, change, reason in ((8, {"queries": 2}, "more than a query"), (8, {"cap": 5.0}, "capped"),
                                  (gpu_choice.MOST_PAGES + 1, {}, "fit into registers")):
        with pytest.raises(Unsupported, match=reason):
            told = {"queries": 1, "cap": None, **change, **options}
            gpu_choice.choose_pages(jnp.zeros((1, 1, 1, pages)), lengths, None, **told)
    for rows, dim, dtype, reason in ((65, 8, "bfloat16", "query rows"), (17, 8, "float32", "query rows"),
                                     (4, 512, "float32", "channels"), (4, 8, "int8", "dtype int8")):
        with pytest.raises(Unsupported, match=reason):
            gpu_logits.page_logits(jnp.zeros((1, 1, rows, dim), dtype), jnp.zeros((1, 1, 8, dim), dtype), None, interpret=True)


@pytest.mark.parametrize("stored, units, width", [pytest.param(4, 4, 24, marks=pytest.mark.slow), (1, 2, 160)])
def test_pages_are_attended_where_they_lie(stored, units, width):
    """As those that are gathered, of heads that share tokens or own them; pages that are missing hold no token."""
    rng, page, lengths = np.random.default_rng(width), 4, np.array([40, 11], np.int32)
    rows = [jnp.asarray(rng.normal(size=(2, stored, 80, width)), jnp.float32) for _ in range(2)]
    chosen = np.sort([[rng.permutation(20)[:10] for _ in range(units)] for _ in range(2)], axis=-1)
    chosen[1, :, 3:] = 20
    q, positions = jnp.asarray(rng.normal(size=(2, 1, 8, width)), jnp.float32), jnp.full((2, 1), 80)
    pages = [ChosenPages(x, jnp.asarray(chosen, jnp.int32), page) for x in rows]
    none = PerHead(jnp.zeros((2, units, 40), jnp.int32), None, 4)
    found, gathered = (
        coefficient_attention(q, CachedTokens(*some, jnp.asarray(lengths), none), scale=SCALE, q_positions=positions,
                              causal=False, window=None, backend=backend)
        for some, backend in ((pages, "triton"), ([x.widened() for x in pages], "xla")))
    np.testing.assert_allclose(found.out, gathered.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, gathered.lse, atol=1e-5)


@pytest.mark.parametrize("dim, backends", [(8, ("triton",)), pytest.param(72, ("triton", "xla"), marks=pytest.mark.slow)])
def test_keys_are_rebuilt_of_pages_beside_other_tokens(dim, backends):
    """Coefficients that two heads share, each with pages of its own, at positions behind gaps; exact tokens, some rows of
    which are empty, are read by the same programs, but for heads that are too wide."""
    rng, page, heads, rank = np.random.default_rng(dim), 4, 2, 24
    starts, jumps = np.array([[3, 9], [0, 50]], np.int32), np.array([[100, 7], [5, 1000]], np.int32)
    chosen = np.array([[[0, 2, 5], [1, 2, 5]], [[0, 1, 6], [0, 2, 6]]], np.int32)
    lengths, slots = np.array([11, 8], np.int32), (chosen[..., None] * page + np.arange(page)).reshape(2, heads, -1)
    where = slots + (np.where(slots[..., None] >= starts[:, None, None], jumps[:, None, None], 0)).sum(-1)
    k, v = (jnp.asarray(rng.normal(size=(2, n, 24, width)), jnp.float32) for n, width in ((1, rank), (heads, dim)))
    basis = jnp.asarray(rng.normal(size=(heads, dim, rank)), jnp.float32)
    q, at = jnp.asarray(rng.normal(size=(2, 1, 6, dim)) / dim, jnp.float32), jnp.full((2, 1), 5000)
    runs = Runs(jnp.asarray(starts), jnp.asarray(jumps))
    pages = [ChosenPages(x, jnp.asarray(chosen), page) for x in (k, v)]
    others = [Beside(q, CachedTokens(*(jnp.asarray(rng.normal(size=(2, heads, 5, dim)), jnp.float32) for _ in range(2)),
                                     jnp.array(n), runs), at, False) for n in ([5, 0], [0, 2])]
    common = dict(rope=RopeSpec(10000.0, dim), kv_heads=heads, scale=SCALE, q_positions=at, causal=False, window=None)
    told = OfPages(jnp.asarray(where, jnp.int32), None, heads, runs)
    for backend in backends:
        found = rotary_coefficient_attention(q, CachedTokens(*pages, jnp.asarray(lengths), told), basis, **common,
                                             beside=others, backend=backend)
        plain = CachedTokens(*(x.widened() for x in pages), jnp.asarray(lengths), PerHead(told.position, None, heads))
        parts = [rotary_coefficient_attention(q, plain, basis, **common, backend="xla"),
                 *(attend_to(x, scale=SCALE, backend="xla") for x in others)]
        for one, other in zip(found, merge(parts), strict=True):
            np.testing.assert_allclose(one, other, atol=3e-5)


@pytest.mark.parametrize("spec", [
    "quest:budget=8,keep=none,page=4,sinks=2,recent=4,dense_layers=0",
    "shadowkv:budget=8,keep=none,page=4,sinks=2,recent=4,outliers=2",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "xkv:group=1,sinks=4,recent=8,rebuild=8,rebuild_block=4",
        "static-pca:rank=0.5,sinks=2,recent=4+quest:budget=8,keep=none,page=4,sinks=2,recent=4,dense_layers=0")),
])
def test_steps_read_what_xla_reads(spec, monkeypatch):
    states, called = steps_by_backend(spec, monkeypatch, (gpu_choice, "choose_pages"), jnp.array([1, 1]))
    assert called == 1
    by_xla, by_kernel = ([*jax.tree.leaves(states[backend][1]), states[backend][2]] for backend in ("xla", "triton"))
    for one, other in zip(by_xla, by_kernel, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)
