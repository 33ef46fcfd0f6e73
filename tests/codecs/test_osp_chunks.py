"""Chunks of Online Subspace Projection when slots run out, ranks of each head, and what is learned from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, attend, bases_for, model, prompts, rebuilt, softmax_attention
from test_ojakv import products
from test_osp import DIM, KV, LENGTH, SPEC, bases_of, compressed, layer_taps, layout_of, residual, small

from lowrank_kv_jax import with_token_layout
from lowrank_kv_jax.codecs.osp_sides import quarter_turn
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.methods import OnlineSubspaceProjection, StaticSubspace, machine_of
from lowrank_kv_jax.methods.parse import parse_method

LENGTHS = (LENGTH, 90)


def seen(method, state):
    return [np.asarray(x, np.float64) for x in rebuilt(method, layout_of(), bases_of(method), state.store)]


@pytest.mark.parametrize("fields", [
    {}, pytest.param({"rope": "pre", "rotary": True, "rank": 4}, marks=pytest.mark.slow),
    pytest.param({"rank": None, "energy": 0.5, "head_ranks": "own"}, marks=pytest.mark.slow),
])
def test_two_chunks_share_the_principal_basis_of_what_both_hold(fields):
    """With one slot too few two adjacent chunks lose what their common principal basis does not hold, the others nothing."""
    roomy = small(**fields, when_full="keep")
    _, before = compressed(roomy)
    _, after = compressed(small(**fields, chunks=4))
    old, new = np.asarray(before.store.chunks.owner)[0], np.asarray(after.store.chunks.owner)[0]
    assert np.asarray(before.store.chunks.used).tolist() == [5, 4] and np.asarray(after.store.chunks.used).tolist() == [4, 4]
    assert (np.diff(new[:13]) >= 0).all() and len(set(new[:13])) == 4
    np.testing.assert_array_equal(before.store.chunks.owner[1], after.store.chunks.owner[1])  # the other row had room
    merged = next(c for c in range(4) if len(set(old[:12][new[:12] == c])) == 2)  # the last chunk came after the merge
    tokens = np.repeat(new == merged, 8)[:100]
    for side, (kept, lost) in enumerate(zip(seen(roomy, before), seen(roomy, after), strict=True)):
        np.testing.assert_allclose(lost[1], kept[1], atol=1e-5)
        np.testing.assert_allclose(lost[0, :, :100][:, ~tokens], kept[0, :, :100][:, ~tokens], atol=1e-5)
        for head in range(KV):
            x = kept[0, head, :100][tokens]
            moment = x.T @ x
            if fields.get("rotary") and side == 0:
                moment = moment + quarter_turn(DIM, DIM).T @ moment @ quarter_turn(DIM, DIM)
            rank = np.linalg.matrix_rank(lost[0, head, :100][tokens], tol=1e-3)
            basis = np.linalg.eigh(moment)[1][:, ::-1][:, :rank]
            np.testing.assert_allclose(lost[0, head, :100][tokens], x @ basis @ basis.T, atol=2e-3)


@pytest.mark.parametrize("fields", [
    {"tau_k": 0.1}, pytest.param({"bits": 8, "basis_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param({"rank": None, "energy": 1.0, "head_ranks": "own", "tau_k": 0.1}, marks=pytest.mark.slow),
])
def test_merging_without_truncation_is_exact(fields):
    """Whatever is merged how often; in 8 bits to what requantising costs."""
    method = small(**{"rank": 1.0, "chunk_length": 16, "chunks": 2, "min_chunk": 8, **fields})
    layout, state = compressed(method)
    taps, at = layer_taps(), jnp.array([[LENGTH], [90]])
    out = attend(machine_of(method), layout, bases_of(method), state, taps.q[:, :1], at)
    mask = np.arange(LENGTH)[None, None] < np.array(LENGTHS)[:, None, None]
    exact, _ = softmax_attention(taps.q[:, :1], taps.k, taps.v, mask, SPEC.scale)
    np.testing.assert_allclose(out.out, exact, atol=0.05 if method.bits else 2e-5)
    assert np.asarray(state.store.chunks.used).tolist() == [2, 2]


def test_triggers_have_slots_of_their_own():
    """Out of the box a chunk that ends early takes nothing from later ones, and merging loses less than a frozen basis."""
    triggers = {"lookahead": 0, "tau_k": 0.0, "chunk_length": 48, "min_chunk": 16}  # every page
    layout, made, calm = layout_of(), small(**triggers), small(**triggers | {"tau_k": None})
    assert calm.most_chunks(layout) == 4 == made.most_chunks(layout) and made.merges(layout) and not calm.merges(layout)
    keeping = dataclasses.replace(made, when_full="keep")
    assert keeping.most_chunks(layout) == 10 and not keeping.merges(layout)
    assert dataclasses.replace(made, chunk_length=160).most_chunks(layout) == 2
    starved = dataclasses.replace(keeping, chunks=4)  # 7 pages
    losses = [np.nanmean(residual(own, compressed(own)[1])[0][0]) for own in (keeping, made, starved)]
    assert losses[1] < 1.1 * losses[0] and losses[1] < 0.8 * losses[2]


def test_each_head_has_chunks_of_its_own_rank():
    """Stored as many channels as a head has, learned head by head; equal ranks give what one rank for all heads gives."""
    own = small(rank=None, energy=0.6, head_ranks="own")
    bases = bases_of(own)
    _, state = compressed(own)
    chunks, rank = state.store.chunks, bases.k.shape[-1]
    assert chunks.k_bases.codes.shape[2:] == (1, DIM, rank) and chunks.k_learned.moment.shape[1:] == (KV, DIM, DIM)
    assert state.store.tokens.k.shape[-1] == rank < KV * bases_of(dataclasses.replace(own, head_ranks="max")).k.shape[-1]
    projectors = np.asarray(chunks.k_bases.take(jnp.zeros((2, 1), jnp.int32)))[:, 0, 0]
    np.testing.assert_allclose(np.swapaxes(projectors, 1, 2) @ projectors, np.eye(rank)[None].repeat(2, 0), atol=1e-5)
    blocks = projectors.reshape(2, KV, DIM, rank)
    assert ((np.abs(blocks).max(2) > 0).sum(1) == 1).all()  # each column is of one head
    with pytest.raises(ValueError, match="head_ranks='own', rotary=False, estimator='oja'"):
        dataclasses.replace(own, estimator="oja")
    ones = {"energy": 1e-6, "rank": None, "when_full": "keep"}  # one column for every head, either way
    found = [compressed(small(**ones, head_ranks=x, tau_k=0.5)) for x in ("own", "max")]
    for a, b in zip(*(seen(small(**ones, head_ranks=x), s) for x, (_, s) in zip(("own", "max"), found, strict=True)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    np.testing.assert_allclose(found[0][1].store.chunks.missed, found[1][1].store.chunks.missed, atol=1e-4)


@pytest.mark.slow
def test_what_is_learned_from_every_third_token():
    """Pages and tokens ahead are thinned, calibration is not: its weight shrinks as theirs does."""
    taps = layer_taps()
    thin = small(subsample=3, window=None, lookahead=24, prior=6.0, min_chunk=24)
    _, state = compressed(thin)
    x = np.asarray(taps.k, np.float64)[0, 4:104].swapaxes(0, 1)
    start = np.asarray(bases_of(thin).k, np.float64)
    order = 1e-3 * (2 - np.arange(3) / 3)
    fed = np.concatenate([x[:, i : min(i + 24, 100) : 3] for i in range(0, 100, 24)], axis=1)
    expected = np.einsum("kdr,r,ker->kde", start, order, start) + np.einsum("ktd,kte->kde", fed, fed)
    np.testing.assert_allclose(state.store.chunks.k_learned.moment[0], expected, atol=1e-3)
    moment = np.einsum("ktd,kte->kde", x[:, :24:3], x[:, :24:3]) + np.einsum("kdr,r,ker->kde", start, order, start)
    moment = moment + 2 * np.einsum("kdr,kr,ker->kde", start, np.asarray(bases_of(thin).k_energy, np.float64), start)
    u = np.linalg.eigh(moment)[1][..., ::-1][..., :3]
    ours = np.asarray(state.store.chunks.k_bases.take(jnp.zeros((2, 1), jnp.int32)))[0, 0]
    np.testing.assert_allclose(ours @ np.swapaxes(ours, 1, 2), u @ np.swapaxes(u, 1, 2), atol=2e-3)


def test_calibrated_bases_in_bytes():
    """int8 with a scale a direction: a quarter of float32's bytes, and nearly the same attention."""
    plain, small_bases = (StaticSubspace(rank=3, sinks=4, recent=8, basis_dtype=x) for x in (None, "int8"))
    (a, b), (layout, state) = (bases_of(plain), bases_of(small_bases)), compressed(small_bases)
    assert b.k.dtype == jnp.int8 and b.k_scales.shape == (KV, 1, 3)
    np.testing.assert_allclose(b.wide()[0], a.k, atol=0.005)
    taps, at = layer_taps(), jnp.array([[LENGTH], [90]])
    ours = attend(machine_of(small_bases), layout, b, state, taps.q[:, :1], at)
    theirs = attend(machine_of(plain), layout, a, compressed(plain)[1], taps.q[:, :1], at)
    np.testing.assert_allclose(ours.out, theirs.out, atol=0.02)


def test_presets_are_the_papers_settings():
    paper, streaming = parse_method("osp:paper"), parse_method("osp:streaming,rank=4")
    assert isinstance(paper, OnlineSubspaceProjection) and isinstance(streaming, OnlineSubspaceProjection)
    assert (streaming.rope, streaming.lookahead, streaming.prior, streaming.unseen, streaming.window) == ("post", 0, 0, 0, 256)
    follow, plain = parse_method("osp:follow"), OnlineSubspaceProjection()
    assert follow == dataclasses.replace(plain, rope="post", unseen=0.0) and plain.rope == "pre" and plain.unseen > 0
    assert (paper.estimator, paper.gamma, paper.bits, paper.sinks, paper.lookahead) == (
        "frequent_directions", "sqrt_rank", 8, 0, 0)


@pytest.mark.parametrize("fields", [
    {"tau_k": 0.1, "reuse": 0.9}, pytest.param({"rope": "pre", "rotary": True, "rank": 4}, marks=pytest.mark.slow),
])
def test_bases_are_learned_and_chunks_merged_in_the_highest_precision(fields):
    method = small(chunks=2, **fields)
    layout, bases, taps = layout_of(), bases_of(method), layer_taps()
    assert method.merges(layout)
    tokens = Tokens(taps.k, taps.k_pre, taps.v, jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)))

    def coded(tokens, counts):
        return method.take_in(layout, bases, method.empty(layout, bases, LENGTH), (tokens,), counts, counts)

    found = list(products(jax.make_jaxpr(coded)(tokens, jnp.array(LENGTHS)).jaxpr))
    assert len(found) > 12
    for equation in found:
        assert set(equation.params["precision"] or ()) == {jax.lax.Precision.HIGHEST}, equation


@pytest.mark.parametrize("layout", ["tokens", pytest.param("lanes", marks=pytest.mark.slow)])
def test_chunks_are_merged_while_decoding(layout):
    """A bfloat16 cache, whose buffers a CPU holds as bits, in either layout; at full rank as good as the full cache."""
    method = parse_method("osp:rank=1.0,sinks=4,recent=8,chunk_length=16,min_chunk=8,tau_k=0,chunks=3")
    tokens, params, given = prompts(2), model().params, {"bases": bases_for(method)}
    cache, _ = prefill(method, PLAIN, params, tokens[:, :64], capacity=112, block=16, **given)
    exact, _ = prefill(parse_method("full"), PLAIN, params, tokens[:, :64], capacity=112, block=16)
    cache = with_token_layout(cache, "lanes") if layout == "lanes" else cache
    for begin in (64, 80):
        cache, ours = extend(method, PLAIN, params, cache, tokens[:, begin : begin + 16], **given)
        exact, theirs = extend(parse_method("full"), PLAIN, params, exact, tokens[:, begin : begin + 16])
        np.testing.assert_allclose(ours, theirs, atol=0.1)
        cache, exact = refresh(method, cache, **given), refresh(parse_method("full"), exact)
    assert np.asarray(cache.groups[0].store.chunks.used).tolist() == [3, 3]
