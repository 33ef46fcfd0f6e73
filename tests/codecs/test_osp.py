"""Online Subspace Projection: one softmax over chunks, what begins a chunk, and what it costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, attend, model, prompts, random_moments, rebuilt, softmax_attention

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.osp_sides import prior_tokens, quarter_turn
from lowrank_kv_jax.codecs.subspace import least_squares_gamma
from lowrank_kv_jax.generation.forward import compress_group, extend, make_layout, prefill, refresh
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.methods import OnlineSubspaceProjection, StaticSubspace, machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels.chunked_attention import chunked_attention, folded, pages
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.chunk_bases import store_bases
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import store_tokens

SPEC, LENGTH, SHIFT = PLAIN.attention, 112, 60
HEADS, KV, DIM = SPEC.q_heads, SPEC.kv_heads, SPEC.head_dim


@functools.cache
def layer_taps(rank=3, seed=0, rope=False):
    """Two rows of tokens whose keys and values change their subspaces at SHIFT."""
    rng = np.random.default_rng(seed)

    def side():
        parts = []
        for n in (SHIFT, LENGTH - SHIFT):
            spans = np.linalg.qr(rng.normal(size=(2, KV, DIM, DIM)))[0][..., :rank]
            parts.append(np.einsum("bktr,bkdr->btkd", rng.normal(size=(2, KV, n, rank)), spans))
        return jnp.asarray(np.concatenate(parts, axis=1) + 0.01 * rng.normal(size=(2, LENGTH, KV, DIM)), jnp.float32)

    k, v = side(), side()
    q = jnp.asarray(rng.normal(size=(2, LENGTH, HEADS, DIM)), jnp.float32)
    turned = rotate(k, *rope_angles(SPEC.rope, jnp.arange(LENGTH)[None, :, None])) if rope else k
    return Taps(q, turned, k, v, jnp.zeros((2, LENGTH, 1)))


def small(**fields):
    wanted = {"rank": 3, "rope": "post", "chunk_length": 24, "min_chunk": 8, "sinks": 4, "recent": 8, "lookahead": 24,
              "window": 24, "prior": 0.0, "unseen": 0.0}
    return OnlineSubspaceProjection(**{**wanted, **fields})


@functools.cache
def bases_of(method):
    return method.fit(SPEC, random_moments(PLAIN))[0]


def layout_of(prompt=LENGTH, capacity=160):
    return make_layout(PLAIN, 2, prompt, capacity, 16, jnp.float32)


def compressed(method, lengths=(LENGTH, 90), **kind):
    layout = layout_of()
    state = compress_group(method, layout, bases_of(method), (layer_taps(**kind),), jnp.array(lengths, jnp.int32))
    return layout, state


def residual(method, state, lengths=(LENGTH, 90), **kind):
    """Relative residual energies (keys, values) of coded tokens, a row each `[2, S]`; NaN where none is."""
    keys, values = rebuilt(method, layout_of(), bases_of(method), state.store)
    taps, out = layer_taps(**kind), []
    for seen, x in ((keys, taps.k_pre if method.rope == "pre" else taps.k), (values, taps.v)):
        rows = np.full((2, LENGTH), np.nan)
        for row, n in enumerate(np.asarray(state.store.tokens.length)):
            own = np.asarray(x)[row, method.sinks : method.sinks + n].swapaxes(0, 1)
            rows[row, :n] = ((seen[row, :, :n] - own) ** 2).sum((0, 2)) / (own**2).sum((0, 2))
        out.append(rows)
    return out


# ---- one softmax over all chunks --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk, page", [(40, 20), pytest.param(24, 8, marks=pytest.mark.slow)])
def test_nothing_truncated_is_exact_attention_for_any_chunking(chunk, page):
    """To 1e-5, whatever bases the chunks have."""
    method = small(rank=1.0, chunk_length=chunk, min_chunk=page)
    layout, state = compressed(method)
    taps, at = layer_taps(), jnp.array([[LENGTH, LENGTH + 1], [90, 91]])
    q = taps.q[:, :2]
    out = attend(machine_of(method), layout, bases_of(method), state, q, at)
    mask = np.arange(LENGTH)[None, None] < np.array([LENGTH, 90])[:, None, None]
    exact, lse = softmax_attention(q, taps.k, taps.v, np.broadcast_to(mask, (2, 2, LENGTH)), SPEC.scale)
    np.testing.assert_allclose(out.out, exact, atol=1e-5)
    np.testing.assert_allclose(out.lse, lse, atol=1e-5)
    assert int(state.store.chunks.used.max()) == -(-int(state.store.tokens.length.max()) // chunk)


@pytest.mark.parametrize("groups, rope, window, bits, dtype", [
    pytest.param(4, False, None, None, "float32", marks=pytest.mark.slow), (1, True, 700, None, "bfloat16"),
    pytest.param(4, True, None, 8, "int8", marks=pytest.mark.slow), pytest.param(2, False, 300, 8, "float8_e4m3fn", marks=pytest.mark.slow),
])
def test_truncated_chunks_equal_softmax_over_what_was_rebuilt(monkeypatch, groups, rope, window, bits, dtype):
    """Section 6: the exact softmax over the approximated logits, applied to the approximated values; several blocks."""
    monkeypatch.setattr(folded, "TOGETHER", 4)  # two parts, of which the last begins earlier
    monkeypatch.setattr(pages, "BLOCK", 512)
    rng, page, size, rank, chunks = np.random.default_rng(0), 64, 1280, 5, 7
    width = KV // groups * DIM
    sides = []
    for _ in range(2):
        u = np.linalg.qr(rng.normal(size=(2, chunks, groups, width, rank)))[0]
        bases = store_bases(jnp.asarray(u, jnp.float32), dtype, by_rows=bool(sides))  # as the method: those of values
        sides.append((bases, jnp.asarray(rng.normal(size=(2, groups, size, rank)), jnp.float32)))
    owner = jnp.asarray(rng.integers(0, chunks, (2, size // page)), jnp.int32)
    lengths = jnp.array([1250, 700])
    runs = Runs(jnp.array([[0, 640]] * 2), jnp.array([[4, 9]] * 2))
    stored = [store_tokens(c, bits, jnp.float32) for _, c in sides]
    q = jnp.asarray(rng.normal(size=(2, 3, HEADS, DIM)), jnp.float32)
    at = jnp.broadcast_to(jnp.arange(1300, 1303), (2, 3))
    part = jax.jit(functools.partial(
        chunked_attention, page=page, rope=SPEC.rope if rope else None, kv_heads=KV, scale=SPEC.scale, window=window
    ))(q, CachedTokens(*stored, lengths, runs), owner, sides[0][0], sides[1][0], q_positions=at)

    rebuilt = []
    for (bases, _), kept in zip(sides, stored, strict=True):
        c = np.asarray(kept if bits is None else kept.read_block(0, size), np.float64)
        u = np.asarray(bases.take(owner), np.float64)
        x = np.einsum("bjpsr,bpjwr->bjpsw", c.reshape(2, groups, -1, page, rank), u)
        rebuilt.append(x.reshape(2, groups, size, KV // groups, DIM).transpose(0, 2, 1, 3, 4).reshape(2, size, KV, DIM))
    where = np.asarray(runs.at(jnp.arange(size)))
    if rope:
        rebuilt[0] = rotate(jnp.asarray(rebuilt[0], jnp.float32), *rope_angles(SPEC.rope, jnp.asarray(where)[:, :, None]))
    mask = (np.arange(size)[None] < np.asarray(lengths)[:, None])[:, None] & np.ones((2, 3, 1), bool)
    if window is not None:
        mask = mask & (where[:, None] > np.asarray(at)[:, :, None] - window)
    out, lse = softmax_attention(q, *rebuilt, mask, SPEC.scale)
    np.testing.assert_allclose(part.out, out, atol=2e-5)
    np.testing.assert_allclose(part.lse, lse, atol=2e-5)


@pytest.mark.slow
def test_no_coded_token_is_an_empty_part():
    method = small()
    layout = layout_of()
    state = machine_of(method).init(layout, bases_of(method))
    part = attend(machine_of(method), layout, bases_of(method), state, layer_taps().q[:, :1], jnp.zeros((2, 1), jnp.int32))
    assert np.isneginf(part.lse).all() and not np.asarray(part.out).any()


# ---- what begins a chunk ----------------------------------------------------------------------------------------


def reference_chunks(method, x, count, seen, start, energy):
    """Section 5 for one row in float64, keys and values `[K, T, D]`: the basis of each page, and all bases.

    With a covariance, whose past fades with the window; the residuals decide page by page.
    """
    learned = [1e-3 * np.einsum("kdr,r,ker->kde", u, 2 - np.arange(u.shape[-1]) / u.shape[-1], u) for u in start]
    bases, owners, begun, missed, page = [], [], 0, None, method.page
    for at in range(0, count, page):
        fired = missed is not None and any(
            tau is not None and (m / page).max() > tau for tau, m in zip((method.tau_k, method.tau_v), missed, strict=True)
        )
        if at == 0 or at - begun >= method.chunk_length or fired:
            begun = at
            if len(bases) < (method.chunks or 99):
                ahead = [s[:, at : min(at + method.lookahead, seen)] for s in x]
                prior = method.prior + method.unseen * max(method.chunk_length - ahead[0].shape[1], 0)
                moments = [
                    m + np.einsum("ktd,kte->kde", a, a) + prior * np.einsum("kdr,kr,ker->kde", u, e, u)
                    for m, a, u, e in zip(learned, ahead, start, energy, strict=True)
                ]
                bases.append([np.linalg.eigh(m)[1][..., ::-1][..., : u.shape[-1]] for m, u in zip(moments, start, strict=True)])
        owners.append(len(bases) - 1)
        end = min(at + page, count)
        missed, fade = [], np.exp(-(end - 1 - np.arange(at, end)) / method.window)
        for side in range(2):
            part = x[side][:, at:end]
            c = part @ bases[-1][side]
            left = np.maximum((part**2).sum(-1) - (c**2).sum(-1), 0)
            missed.append(np.sqrt(left / (part**2).sum(-1)).sum(-1))
            learned[side] = learned[side] * np.exp(-(end - at) / method.window) + np.einsum("ktd,kte,t->kde", part, part, fade)
    return owners, bases


@pytest.mark.parametrize("fields", [
    pytest.param({}, marks=pytest.mark.slow), {"lookahead": 0, "tau_k": 0.3, "tau_v": 0.3, "chunk_length": 96, "chunks": 12},
    pytest.param({"chunks": 2, "when_full": "keep", "prior": 5.0, "unseen": 0.5, "lookahead": 12}, marks=pytest.mark.slow),
])
def test_chunks_equal_a_float64_oracle(fields):
    method, lengths = small(**fields), (LENGTH, 90)
    _, state = compressed(method)
    taps, bases = layer_taps(), bases_of(method)
    for row, length in enumerate(lengths):
        x = [np.asarray(s, np.float64)[row, 4:].swapaxes(0, 1) for s in (taps.k, taps.v)]
        count = length - 12
        owners, found = reference_chunks(method, x, count, length - 4, *([np.asarray(u, np.float64) for u in part] for part in (bases[:2], bases[2:4])))
        np.testing.assert_array_equal(state.store.chunks.owner[row, : len(owners)], owners)
        assert int(state.store.chunks.used[row]) == len(found) > 1
        for side, (room, stored) in enumerate(((state.store.chunks.k_bases, state.store.tokens.k), (state.store.chunks.v_bases, state.store.tokens.v))):
            ours = np.asarray(room.take(jnp.arange(room.capacity)[None].repeat(len(lengths), 0)), np.float64)[row]
            for number, pair in enumerate(found):
                ours_p, theirs = (u @ np.swapaxes(u, -1, -2) for u in (ours[number], pair[side]))
                np.testing.assert_allclose(ours_p, theirs, atol=2e-3)
            of_token = ours[np.repeat(owners, method.page)[:count]]
            expected = np.einsum("ktd,tkdr->ktr", x[side][:, :count], of_token)
            np.testing.assert_allclose(stored[row, :, :count], expected, atol=1e-4)


@pytest.mark.slow
def test_a_shift_of_the_text_ends_a_chunk():
    """A subspace that changes fires the trigger at the end of the page in which it does; one that stays does not."""
    method = small(lookahead=8, tau_k=0.3, tau_v=0.3, chunk_length=96, chunks=12)
    _, state = compressed(method)
    owner = np.asarray(state.store.chunks.owner)[0, :12]
    page = (SHIFT - 4) // 8  # the page in which the shift lies, counted from behind the sinks
    assert len(set(owner[1 : page + 1])) == 1 and owner[page + 1] > owner[page]
    keys, _ = residual(method, state)
    assert np.nanmean(keys[0, 8 : page * 8]) < 0.05 and np.nanmean(keys[0, (page + 2) * 8 :]) < 0.1


@pytest.mark.slow
def test_adapting_loses_less_than_staying():
    """RER after the shift: look-ahead < trailing only < calibrated and static."""
    losses = []
    for method in (small(), small(lookahead=0), StaticSubspace(rank=3, sinks=4, recent=8)):
        _, state = compressed(method)
        losses.append(np.nanmean([side[:, SHIFT:] for side in residual(method, state)]))
    assert 2 * losses[0] < losses[1] < losses[2]


@pytest.mark.slow
def test_a_basis_that_still_fits_is_used_again():
    """Adjacent chunks of one subspace share a basis; no bound shares none, a bound of 0 all."""
    used, lost = {}, {}
    for reuse in (None, 0.95, 0.0):
        method = small(reuse=reuse)
        _, state = compressed(method)
        used[reuse], lost[reuse] = np.asarray(state.store.chunks.used), np.nanmean(residual(method, state))
    assert used[None].tolist() == [5, 4] and used[0.0].tolist() == [1, 1]
    assert (used[0.95] < used[None]).all() and (used[0.95] > 1).all()
    assert lost[0.95] < 1.2 * lost[None] + 1e-3 < lost[0.0]


def test_when_there_is_no_room_the_last_basis_stays():
    """More chunks than the capacity holds: tokens are coded in the last basis, as good as it is; nothing breaks."""
    method = small(chunks=2, when_full="keep")
    _, state = compressed(method)
    assert np.asarray(state.store.chunks.used).tolist() == [2, 2]
    np.testing.assert_array_equal(state.store.chunks.owner[0, :12], [0] * 3 + [1] * 9)
    assert np.isfinite(np.asarray(residual(method, state))[:, 0, :100]).all()
    with pytest.raises(ValueError, match="chunks=20: a capacity of 160 tokens has at most 19 chunks of min_chunk=8"):
        machine_of(small(chunks=20)).init(layout_of(), bases_of(small()))


@pytest.mark.slow
def test_streaming_equals_prefill_where_nothing_is_looked_ahead():
    """Tokens appended one block at a time are coded as the same tokens of a prompt are."""
    method = small(lookahead=0, tau_k=0.4)
    layout, taps = layout_of(prompt=50), layer_taps()
    bases = bases_of(method)
    first = jax.tree.map(lambda x: x[:, :50], taps)
    state = compress_group(method, layout, bases, (first,), jnp.array([50, 28]))
    refresh = jax.jit(functools.partial(machine_of(method).refresh, layout, bases))
    for done in range(0, 62, 16):
        rows = np.stack([np.minimum(begin + done + np.arange(16), LENGTH - 1) for begin in (50, 28)])
        new = jax.tree.map(lambda x, rows=rows: x[np.arange(2)[:, None], rows], taps)
        counts = jnp.full((2,), min(16, 62 - done))
        state = refresh(machine_of(method).append(layout, bases, state, new, counts, None, Place()))
    lengths = (50 + 62, 28 + 62)
    whole = compress_group(method, layout_of(), bases, (taps,), jnp.array(lengths))
    for ours, theirs in zip(rebuilt(method, layout, bases, state.store), rebuilt(method, layout_of(), bases, whole.store), strict=True):
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(ours[row, :, : n - 12], theirs[row, :, : n - 12], atol=1e-4)
    np.testing.assert_array_equal(state.store.tokens.length, whole.store.tokens.length)


# ---- gamma ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["per_head", "joint"])
def test_calibrated_gamma_is_least_squares_over_all_pairs(heads):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(KV, 30, DIM)) * np.linspace(2, 0.2, DIM), rng.normal(size=(KV, 40, DIM)) * np.linspace(0.5, 3, DIM)
    groups = KV if heads == "per_head" else 1
    basis = np.linalg.qr(rng.normal(size=(groups, KV // groups * DIM, 3)))[0]
    grouped = k.reshape(groups, -1, 40, DIM).swapaxes(1, 2).reshape(groups, 40, -1)  # heads of a group side by side
    rebuilt = grouped @ basis @ np.swapaxes(basis, -1, -2)
    rebuilt = rebuilt.reshape(groups, 40, -1, DIM).swapaxes(1, 2).reshape(KV, 40, DIM)
    logits, close = (np.einsum("ktd,ksd->kts", q, x) for x in (k, rebuilt))
    expected = (logits * close).sum((1, 2)) / (close**2).sum((1, 2))
    moments = (np.swapaxes(x, -1, -2) @ x for x in (q, grouped))
    np.testing.assert_allclose(least_squares_gamma(basis, *moments), expected, rtol=1e-10)


def test_least_squares_finds_nothing_to_correct_in_a_principal_basis():
    """P commutes with the keys' own second moment, so gamma is 1: the paper's sqrt(r / d) only shrinks."""
    np.testing.assert_allclose(bases_of(StaticSubspace(rank=3)).gain, 0, atol=1e-6)
    np.testing.assert_allclose(bases_of(StaticSubspace(rank=9, heads="joint")).gain, 0, atol=1e-6)
    np.testing.assert_allclose(bases_of(StaticSubspace(rank=None, energy=0.8, head_ranks="own")).gain, 0, atol=1e-6)
    turning = bases_of(OnlineSubspaceProjection(rank=4, rope="pre", rotary=True))  # of the keys and of their quarter turns
    assert np.abs(turning.gain).max() > 1e-3


@pytest.mark.parametrize("spec, gamma", [
    ("osp-static:rank=12,heads=joint,sinks=4,recent=8", "calibrated"),
    pytest.param("osp:rank=3,sinks=4,recent=8,chunk_length=24,min_chunk=8,lookahead=24,window=24,prior=0", "sqrt_rank",
                 marks=pytest.mark.slow),
])
def test_gamma_scales_the_logits_of_coded_tokens(spec, gamma):
    layout, taps = layout_of(), layer_taps()
    q, at = taps.q[:, :1], jnp.array([[LENGTH], [90]])
    plain, method = (parse_method(f"{spec},gamma={kind}") for kind in ("unit", gamma))
    bases, state = bases_of(method), compressed(plain)[1]  # gamma changes nothing that is stored
    bases = bases._replace(gain=jnp.linspace(-0.3, 0.3, KV))
    keys, values = rebuilt(method, layout, bases, state.store)
    expected = np.sqrt(3 / DIM) if gamma == "sqrt_rank" else 1 + np.asarray(bases.gain)[:, None, None]
    np.testing.assert_allclose(keys, rebuilt(plain, layout, bases, state.store)[0] * expected, rtol=1e-5, atol=1e-6)
    full = [np.array(x, np.float64) for x in (taps.k, taps.v)]
    for row, n in enumerate(np.asarray(state.store.tokens.length)):
        for x, seen in zip(full, (keys, values), strict=True):
            x[row, 4 : 4 + n] = np.asarray(seen)[row, :, :n].swapaxes(0, 1)
    mask = (np.arange(LENGTH)[None] < np.array([LENGTH, 90])[:, None])[:, None]
    part = attend(machine_of(method), layout, bases, state, q, at)
    np.testing.assert_allclose(part.out, softmax_attention(q, *full, mask, SPEC.scale)[0], atol=2e-5)
    assert np.abs(part.lse - attend(machine_of(plain), layout, bases, state, q, at).lse).max() > 1e-3


@pytest.mark.parametrize("rope, rule", [
    pytest.param("post", "h2o:budget=24,sinks=2,recent=4", marks=pytest.mark.slow),
    pytest.param("pre", "snapkv:budget=24,sinks=2,recent=4+moments", marks=pytest.mark.slow),
])
def test_behind_a_selection_gamma_is_a_longer_key_basis(rope, rule):
    """gamma q . (U U^T k) is q . (V V^T k) with V = sqrt(gamma) U: the same logits, hence votes, hence tokens that stay."""
    tokens, params = prompts(2, 96 + 32), model(PLAIN).params
    gains = jnp.linspace(-0.6, 1.5, KV)

    def logits(gamma, longer):
        method = parse_method(f"osp-static:rank=5,sinks=2,recent=4,rope={rope},gamma={gamma}+{rule}")
        bases = tuple(
            b._replace(gain=gains, k=b.k * jnp.sqrt(1 + gains)[:, None, None] if longer else b.k)
            for b in method.fit(SPEC, random_moments(PLAIN))
        )
        cache, _ = prefill(method, PLAIN, params, tokens[:, :96], bases=bases, capacity=160, block=8, dtype=jnp.float32)
        out = []
        for begin in range(96, 128, 8):
            piece = tokens[:, begin : begin + 8]
            cache, found = extend(method, PLAIN, params, cache, piece, bases=bases, all_logits=True)
            cache = refresh(method, cache, bases=bases)
            out.append(found)
        return np.concatenate(out, axis=1)

    scaled = logits("calibrated", longer=False)
    np.testing.assert_allclose(scaled, logits("unit", longer=True), atol=1e-4)
    assert np.abs(scaled - logits("unit", longer=False)).max() > 0.05


def test_directions_that_hold_no_energy_have_priors():
    """Rounding leaves a little less than none."""
    tokens = prior_tokens(jnp.eye(3)[None], jnp.array([[4.0, 0.0, -1e-9]]), None, 1)
    np.testing.assert_array_equal(tokens, np.diag([2.0, 0.0, 0.0])[None])


def test_each_head_has_the_rank_that_its_energy_asks_for():
    """Coefficients side by side, as many as are needed; each head is projected by its own columns."""
    energy = 0.8
    own, widest = (StaticSubspace(rank=None, energy=energy, head_ranks=x, sinks=4, recent=8) for x in ("own", "max"))
    moments = random_moments(PLAIN)
    ranks = {}
    for side, moment in (("k", moments.per_head("k", KV)[0]), ("v", moments.per_head("v", KV)[0])):
        values = np.linalg.eigvalsh(moment.astype(np.float64))[:, ::-1]
        ranks[side] = [int(np.searchsorted(np.cumsum(x) / x.sum(), energy)) + 1 for x in values]
    bases = bases_of(own)
    assert bases.k.shape == (1, KV * DIM, sum(ranks["k"])) and bases.v.shape[-1] == sum(ranks["v"])
    assert len(set(ranks["k"] + ranks["v"])) > 1 and bases_of(widest).k.shape[-1] == max(ranks["k"])
    _, state = compressed(own)
    assert state.store.tokens.k.shape[1] == 1 and state.store.tokens.k.nbytes < compressed(widest)[1].store.tokens.k.nbytes
    values = rebuilt(own, layout_of(), bases, state.store)[1]
    for head, rank in enumerate(ranks["v"]):
        u = np.asarray(bases_of(widest).v, np.float64)[head, :, :rank]
        x = np.asarray(layer_taps().v, np.float64)[0, 4:104, head]
        np.testing.assert_allclose(values[0, head, :100], x @ u @ u.T, atol=1e-4)
    for wrong in ({"energy": None, "rank": 4}, {"heads": "joint"}):
        with pytest.raises(ValueError, match="head_ranks='own'"):
            dataclasses.replace(own, **wrong)


# ---- variants ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rotary_bases_are_complex_subspaces():
    """The rotation-aware basis: with each direction it holds i times it, read by frequency pairs."""
    method = small(rank=4, rope="pre", rotary=True, lookahead=24)
    state = compress_group(method, layout_of(), bases_of(method), (layer_taps(rope=True),), jnp.array([LENGTH, 90]))
    bases = np.asarray(state.store.chunks.k_bases.codes)[0, :3].astype(np.float64)
    projector = bases @ np.swapaxes(bases, -1, -2)
    turn = quarter_turn(DIM, DIM)
    np.testing.assert_allclose(turn @ turn, -np.eye(DIM))
    np.testing.assert_allclose(projector @ turn, turn @ projector, atol=1e-4)
    plain = small(rank=4, rope="pre")
    other = compress_group(plain, layout_of(), bases_of(plain), (layer_taps(rope=True),), jnp.array([LENGTH, 90]))
    free = np.asarray(other.store.chunks.k_bases.codes)[0, 0].astype(np.float64)
    free = free @ np.swapaxes(free, -1, -2)
    assert np.abs(free @ turn - turn @ free).max() > 0.1
    # the constraint can only lose energy of the tokens that a basis was fitted to
    assert np.nanmean(residual(plain, other, rope=True)[0]) <= np.nanmean(residual(method, state, rope=True)[0])


@pytest.mark.parametrize("fields", [
    pytest.param({"bits": 8, "basis_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param({"heads": "joint", "rank": 0.4, "basis_dtype": "float8_e4m3fn"}, marks=pytest.mark.slow),
    *(pytest.param({"estimator": name}, marks=pytest.mark.slow) for name in ("frequent_directions", "gha", "oja", "svd")),
])
def test_variants_code_nearly_as_well(fields):
    method = small(**fields)
    assert np.nanmean(residual(method, compressed(method)[1])) < 0.2


@pytest.mark.parametrize("fields, message", [
    ({"sketch": 2}, "sketch=2: keeps 2 directions, fewer than the rank 3"),
    ({"sketch": 0.5, "rank": 0.5}, "sketch=0.5: must be at least 1"),
    ({"chunk_length": 0}, "chunk_length=0: must be an int of at least 1"),
    ({"chunk_length": 20}, "chunk_length=20: must be a multiple of min_chunk=8"),
    ({"tau_k": 1.5}, r"tau_k=1.5: must lie in \[0, 1\]"), ({"tau_v": -0.1}, r"tau_v=-0.1: must lie in \[0, 1\]"),
    ({"reuse": 2.0}, r"reuse=2.0: must lie in \[0, 1\]"), ({"lookahead": -1}, "lookahead=-1"), ({"window": 0}, "window=0"), ({"prior": -1.0}, "prior=-1.0"),
    ({"chunks": 0}, "chunks=0"), ({"gamma": "one"}, "gamma='one': allowed are unit, sqrt_rank, calibrated"),
    ({"estimator": "pca"}, "estimator='pca': allowed are"), ({"basis_dtype": "int4"}, "basis_dtype='int4'"),
    ({"rotary": True}, "rotary=True, rope='post'"), ({"rotary": True, "rope": "pre", "rank": 3}, "rank=3: rotary=True needs even ranks"),
    ({"order": "reconstruct"}, "order='reconstruct': osp has order='reduced' only"), ({"bits": 5}, "bits=5"),
])
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        small(**fields).validate(SPEC)
