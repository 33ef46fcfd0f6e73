"""Palu: truncation, ranks, groups, means, folding, and what calibration collects for them."""

import dataclasses
import functools
import importlib
import types

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, QWEN, WINDOWED, attend, model, prompts, random_moments, run

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.calibration.calibrate import calibrate, collect_moments, iterate_taps, moments_for
from lowrank_kv_jax.calibration.fisher import FisherSample, collect_fisher
from lowrank_kv_jax.codecs.folding import fold_layer
from lowrank_kv_jax.codecs.palu import hadamard_blocks
from lowrank_kv_jax.estimators.moments import Fisher
from lowrank_kv_jax.estimators.rank_allocation import allocate_ranks, nearest_ranks
from lowrank_kv_jax.estimators.whitening import JITTER, LARGEST_JITTER, truncate, whiten
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.evals.studies.streaming.fisher_overlap import fisher_overlap, plot_overlap
from lowrank_kv_jax.generation.forward import decode_step, extend, make_layout, prefill, refresh
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.decoder import block_prefill, embed, unembed
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.segments.coded import cached_tokens
from lowrank_kv_jax.storage.basis import project
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import Runs

ENDS = "sinks=4,recent=8"
TEXT = "the quick brown fox jumps over the lazy dog; " * 20
BIASED = dataclasses.replace(WINDOWED, family="qwen2", windows=(None, None))


@functools.cache
def real_moments(config=PLAIN):
    """Of random tokens through the tiny model, with Fisher information."""
    return moments_for(model(config), [parse_method("palu:rank_by=fisher")], np.asarray(prompts(6, 64)))


def fitted(spec, config=PLAIN):
    method = parse_method(spec)
    return method, method.fit(config.attention, real_moments(config))


# ---- truncation -------------------------------------------------------------------------------------


def paper_factors(x, w, rank):
    """A, B and the loss of equation 26: S W = U sigma V^T with S^T S = X^T X; A = S^-1 U sqrt(sigma), B = sqrt(sigma) V^T."""
    s = np.linalg.cholesky(x.T @ x).T
    u, sigma, vt = np.linalg.svd(s @ w)
    a = np.linalg.solve(s, u[:, :rank]) * np.sqrt(sigma[:rank])
    return a, np.sqrt(sigma[:rank, None]) * vt[:rank], np.sum(sigma[rank:] ** 2)


def projected(seed):
    """Hidden states, a projection, and what it gives."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(400, 24)) @ rng.normal(size=(24, 24))
    w = rng.normal(size=(24, 16))
    return x, w, x @ w


def test_whitened_truncation_loses_what_equation_26_predicts_and_no_factors_lose_less():
    x, w, y = projected(0)
    v = truncate(y.T @ y, 6, "x")
    loss = paper_factors(x, w, 6)[2]
    np.testing.assert_allclose(np.sum((y - y @ v @ v.T) ** 2), loss, rtol=1e-9)
    u, sigma, vt = np.linalg.svd(w)  # without whitening it loses more
    plain = x @ (u[:, :6] * sigma[:6]) @ vt[:6]
    assert np.sum((y - plain) ** 2) > 1.05 * loss


def test_truncating_what_a_projection_gives_is_truncating_the_projection():
    """So that calibration keeps no second moments of hidden states."""
    x, w, y = projected(1)
    v = truncate(y.T @ y, 6, "x")
    a, b, _ = paper_factors(x, w, 6)
    np.testing.assert_allclose(w @ v @ v.T, a @ b, atol=1e-8)
    np.testing.assert_allclose(v.T @ v, np.eye(6), atol=1e-12)
    root = np.linalg.norm(b, axis=1)  # B = root V^T, but for signs
    np.testing.assert_allclose(np.abs(x @ a * root), np.abs(y @ v), atol=1e-6)


def test_jitter_mends_rounding_and_nothing_worse():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, 8))
    moment = x.T @ x
    s, added = whiten(moment, "x"), JITTER * np.trace(moment) / 8
    np.testing.assert_allclose(s.T @ s, moment + added * np.eye(8), rtol=1e-9, atol=1e-9)
    values, vectors = np.linalg.eigh(moment)
    values[0] = -3 * JITTER * values.mean()  # what float32 sums leave of a direction without energy
    assert np.isfinite(whiten(vectors * values @ vectors.T, "x")).all()
    values[0] = -10 * LARGEST_JITTER * values.mean()
    with pytest.raises(ValueError, match="second moment of tap 'v' in layer 3 is indefinite.*more or other text"):
        whiten(vectors * values @ vectors.T, "tap 'v' in layer 3")
    with pytest.raises(ValueError, match="not finite and positive"):
        whiten(np.full((2, 2), np.nan), "x")
    with pytest.raises(ValueError, match="not finite and positive"):
        whiten(np.zeros((2, 2)), "x")


def test_a_singular_calibration_says_which_tap_and_what_to_do():
    moments = random_moments(PLAIN)
    dead = np.array(moments.v)
    dead[1, 20:] = dead[1, :, 20:] = 0
    method = parse_method("palu:rank=24")
    with pytest.raises(ValueError, match="tap 'v' in layer 1 is singular, its tokens span 20 of 32.*rank 24.*more text"):
        method.fit(PLAIN.attention, moments._replace(v=dead))
    parse_method("palu:rank=20").fit(PLAIN.attention, moments._replace(v=dead))


# ---- groups and ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("group, shape", [(1, (4, 8, 4)), (2, (2, 16, 8)), (4, (1, 32, 16)), (None, (1, 32, 16))])
def test_groups_of_heads_share_a_latent(group, shape):
    """M-LRD, G-LRD and J-LRD; by default the largest divisor up to 4."""
    method, bases = fitted(f"palu:rank=0.5,head_group={str(group).lower()}")
    assert bases[0].k.shape == bases[0].v.shape == shape
    assert parse_method("palu").group_of(dataclasses.replace(PLAIN.attention, q_heads=12, kv_heads=6)) == 3
    for u in bases[0][:2]:
        gram = np.einsum("jwr,jwp->jrp", u, u)
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(shape[2]), gram.shape), atol=1e-5)


def test_joint_latents_keep_more_than_those_of_heads_alone():
    taps = next(iterate_taps(PLAIN, model().params, prompts(1, 64)))
    lost = []
    for group in (1, 2, 4):
        method, bases = fitted(f"palu:rank=0.5,head_group={group},mean=false")
        state = machine_of(method).init(layout_of(), bases[0])
        frame = method.frame(PLAIN.attention, bases[0], state.store)
        codes = frame.code(taps.k_pre, taps.v)
        close = frame.rebuild("v", codes[1], PLAIN.kv_heads).swapaxes(1, 2)
        lost.append(float(jnp.sum((taps.v - close) ** 2)))
    assert lost[0] > lost[1] > lost[2] > 0


def layout_of(tokens=64):
    return make_layout(PLAIN, 1, tokens, tokens, dtype=jnp.float32)


def test_ranks_follow_importance_in_multiples_and_meet_the_total():
    ranks = allocate_ranks(np.array([1.0, 2.0, 4.0, 1.0]), 64, 8, 64)
    assert ranks.tolist() == [8, 16, 32, 8]
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, multiple, cap = rng.integers(1, 30), int(rng.choice([1, 8, 32])), int(rng.integers(1, 9))
        total = multiple * int(rng.integers(size, size * cap + 1))
        weights = np.exp(rng.normal(size=size) * rng.choice([0.1, 5]))
        ranks = allocate_ranks(weights, total, multiple, multiple * cap)
        assert ranks.sum() == total and not (ranks % multiple).any()
        assert ranks.min() >= multiple and ranks.max() <= multiple * cap
        order = np.argsort(weights)
        assert (np.diff(ranks[order]) >= -multiple).all()  # rounding apart, the more important has more


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((np.ones(3), 25, 8, 32), "total rank of 25 over 3 matrices in multiples of 8.*24..96"),
        ((np.ones(3), 16, 8, 32), "must be one in 24..96"),
        ((np.zeros(3), 24, 8, 32), "not zero everywhere"),
        ((np.array([1.0, np.nan]), 24, 8, 32), "must be finite"),
        ((np.ones(3), 24, 8, 30), "rank_multiple=8: must divide the width of the bases, 30"),
    ],
)
def test_ranks_that_cannot_be_met_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        allocate_ranks(*arguments)


def test_fisher_information_decides_the_ranks_of_layers_and_sides():
    information = np.array([[1.0, 4.0], [1.0, 1.0], [2.0, 3.0]])
    eye = np.eye(32) / 32
    fisher = Fisher(information[:, 0, None, None] * eye, information[:, 1, None, None] * eye, 1)
    moments = random_moments(PLAIN)._replace(fisher=fisher)
    bases = parse_method("palu:rank=16,rank_by=fisher,rank_multiple=4").fit(PLAIN.attention, moments)
    ranks = [(b.k.shape[-1], b.v.shape[-1]) for b in bases]
    assert ranks == [(8, 32), (8, 8), (16, 24)] and sum(map(sum, ranks)) == 6 * 16
    root = parse_method("palu:rank=16,rank_by=fisher-sqrt,rank_multiple=4").fit(PLAIN.attention, moments)
    assert [(b.k.shape[-1], b.v.shape[-1]) for b in root] == [(12, 24), (12, 12), (16, 20)]
    with pytest.raises(ValueError, match="hold no Fisher information"):
        parse_method("palu:rank_by=fisher").fit(PLAIN.attention, random_moments(PLAIN))


def palus_code(fisher, total, multiple, width, groups):
    """`fisher_uniform` of Palu's rank_search.py, step by step."""
    target, ranks = total, [min(groups * width, int(total * f // sum(fisher))) for f in fisher]
    order = sorted(range(len(fisher)), key=lambda i: target * fisher[i] / sum(fisher) - ranks[i])
    missing = target - sum(ranks)
    while missing > 0:
        for i in order:
            if ranks[i] == groups * width:
                continue
            ranks[i] += 1
            missing -= 1
            if missing == 0:
                break
    return [min(max(1, round((rank // groups) / multiple)) * multiple, width) for rank in ranks]


@pytest.mark.parametrize("total, multiple, groups", [(300, 8, 1), (1000, 32, 2), (1500, 32, 2), (2304, 16, 3), (1, 8, 1)])
def test_nearest_ranks_are_those_of_palus_code(total, multiple, groups):
    rng = np.random.default_rng(total)
    for spread in (0.1, 1.0, 3.0):
        fisher = rng.lognormal(0, spread, (6, 2))
        found = nearest_ranks(fisher, total, multiple, 64, groups)
        assert found.ravel().tolist() == palus_code(fisher.ravel().tolist(), total, multiple, 64, groups)
    with pytest.raises(ValueError, match=r"must lie in 1\.\.768"):
        nearest_ranks(fisher, 769, 8, 64)


def test_fisher_information_of_as_many_sequences_as_asked_for():
    tokens, tiny = np.asarray(prompts(2, 64)), types.SimpleNamespace(config=PLAIN, params=model().params)
    np.testing.assert_array_equal(FisherSample(32, 2).rows(tokens), tokens[:, :32])  # of four, the first and the third
    assert FisherSample().rows(tokens).shape == (2, 64) and FisherSample(24).rows(tokens).shape == (4, 24)
    found = collect_fisher(tiny, tokens, sample=FisherSample(64, 1))
    np.testing.assert_allclose(found.k, collect_fisher(tiny, tokens[:1]).k, rtol=1e-6)
    with pytest.raises(ValueError, match="fisher_sequences=5: 2 windows of 64 hold 4 of 32 tokens"):
        FisherSample(32, 5).rows(tokens)


def test_the_papers_preset_takes_any_rank_of_any_depth():
    deep = dataclasses.replace(PLAIN, num_layers=36, windows=(None,) * 36)
    parse_method("palu:paper,rank=0.7").validate(deep.attention)
    fisher = Fisher(*2 * [np.ones((3, 32, 32))], 1, np.array([[1.0, 4.0], [1.0, 1.0], [2.0, 3.0]]))
    moments = random_moments(PLAIN)._replace(fisher=fisher)
    bases = parse_method("palu:paper,rank=16,rank_multiple=4").fit(PLAIN.attention, moments)
    assert [(b.k.shape[-1], b.v.shape[-1]) for b in bases] == [(8, 32), (8, 8), (16, 24)]
    with pytest.raises(ValueError, match="no roots of single entries"):
        parse_method("palu:paper").fit(PLAIN.attention, moments._replace(fisher=fisher._replace(roots=None)))


def test_layers_of_different_ranks_decode():
    white = white_bases(PLAIN.attention, parse_method("palu:rank=20,rank_by=fisher"), jnp.float32)  # 40 a layer: no
    assert sorted(u.shape[-1] for b in white for u in b[:2]) == [16, 16, 16, 24, 24, 24]  # multiple of 8 in each
    method, bases = fitted("palu:rank=0.5,rank_by=fisher,rank_multiple=4," + ENDS)
    assert len({b.v.shape for b in bases}) > 1
    _, logits = prefill(method, PLAIN, model().params, prompts(), bases=bases, dtype=jnp.float32)
    assert np.isfinite(logits).all()


# ---- Fisher information -----------------------------------------------------------------------------


def test_fisher_information_is_that_of_grad_through_the_whole_model():
    tokens = prompts(2, 24)
    found = collect_fisher(model(), np.asarray(tokens))

    def loss(kernels, row):
        x = embed(PLAIN, model().params, row[None])
        positions = jnp.arange(24)[None]
        for layer, (k, v) in zip(model().params["layers"], kernels, strict=True):
            attention = {**layer["attention"], "k_proj": {"kernel": k}, "v_proj": {"kernel": v}}
            x, _ = block_prefill(PLAIN, {**layer, "attention": attention}, x, positions, plain_attention)
        logp = jax.nn.log_softmax(unembed(PLAIN, model().params, x)[0, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, row[1:, None], axis=1))

    kernels = [(a["k_proj"]["kernel"], a["v_proj"]["kernel"]) for a in (p["attention"] for p in model().params["layers"])]
    gradient = jax.jit(jax.grad(loss))
    grads = [gradient(kernels, row) for row in tokens]
    for layer in range(PLAIN.num_layers):
        for side in range(2):
            g = [np.asarray(grad[layer][side], np.float64) for grad in grads]
            expected = sum(x.T @ x for x in g) / 2
            np.testing.assert_allclose(found[side][layer], expected, rtol=2e-4, atol=1e-6 * np.abs(expected).max())
            np.testing.assert_allclose(found.information[layer, side], sum((x**2).sum() for x in g) / 2, rtol=1e-4)
            roots = np.sqrt(sum(x**2 for x in g) / 2)
            np.testing.assert_allclose(found.roots[layer, side], roots.mean(), rtol=1e-4)


def plain_attention(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnd,bsnd->bnts", q, k) * q.shape[-1] ** -0.5
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits), v)


def test_fisher_overlap_is_one_with_itself_and_less_with_another(tmp_path):
    first = real_moments().fisher
    other = collect_fisher(model(), np.asarray(prompts(4, 24, seed=9)))
    same, overlap = fisher_overlap(model(), first, first, 4), fisher_overlap(model(), first, other, 4)
    for side in ("k", "v"):
        np.testing.assert_allclose(same[side], 1.0)
        assert overlap[side].shape == (3, 4) and (overlap[side] < 0.999).all() and (overlap[side] > 0).all()
    kernel = np.asarray(model().params["layers"][1]["attention"]["v_proj"]["kernel"], np.float64)
    band = np.linalg.svd(kernel)[2][8:16].T  # equations 10 and 11, by hand
    a, b = (band.T @ f.v[1] @ band for f in (first, other))
    np.testing.assert_allclose(overlap["v"][1, 1], np.trace(a.T @ b) / np.sqrt(np.trace(a.T @ a) * np.trace(b.T @ b)))
    plot_overlap(str(tmp_path / "f.png"), overlap, "tiny")
    assert (tmp_path / "f.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="bands=33: must lie in 1..32"):
        fisher_overlap(model(), first, first, 33)


# ---- means, norms, turns ----------------------------------------------------------------------------


def with_large_bias(config):
    layers = []
    for i, layer in enumerate(model(config).params["layers"]):
        attention = dict(layer["attention"])
        for j, name in enumerate(("k_proj", "v_proj")):
            bias = 4 * jax.random.normal(jax.random.key(10 * i + j), attention[name]["bias"].shape)
            attention[name] = {**attention[name], "bias": bias}
        layers.append({**layer, "attention": attention})
    return {**model(config).params, "layers": tuple(layers)}


def test_a_bias_is_an_affine_mean():
    """Qwen2: around the mean, what is truncated is x W alone, and the bias costs no direction."""
    biased = helpers.Model(BIASED, with_large_bias(BIASED))
    moments = collect_moments(biased, np.asarray(prompts(6, 64)))
    taps = next(iterate_taps(BIASED, biased.params, prompts(1, 64, seed=5)))
    lost = {}
    for mean in ("true", "false"):
        method = parse_method(f"palu:rank=0.125,mean={mean}")
        bases = method.fit(BIASED.attention, moments)
        state = machine_of(method).init(layout_of(), bases[0])
        frame = method.frame(BIASED.attention, bases[0], state.store)
        codes = frame.code(taps.k_pre, taps.v)
        for side, x, code in zip("kv", (taps.k_pre, taps.v), codes, strict=True):
            close = frame.rebuild(side, code, BIASED.kv_heads).swapaxes(1, 2)
            lost[mean, side] = float(jnp.sum((x - close) ** 2))
    assert lost["true", "k"] < 0.95 * lost["false", "k"] and lost["true", "v"] < 0.95 * lost["false", "v"]
    assert parse_method("palu:rank=0.125").fit(BIASED.attention, moments)[0].k_mean is not None
    assert fitted("palu:rank=1.0")[1][0].k_mean is None  # where they save nothing there are none
    method = parse_method("palu:rank=1.0,mean=true," + ENDS)  # exact, through attention and refreshes
    bases = method.fit(BIASED.attention, moments)
    tokens = prompts(length=PROMPT + 1)
    options = dict(capacity=CAPACITY, block=BLOCK, dtype=jnp.float32)
    logits = []
    for m, b in ((method, bases), (parse_method("full"), None)):
        cache, _ = prefill(m, BIASED, biased.params, tokens[:, :PROMPT], bases=b, **options)
        logits.append(decode_step(m, BIASED, biased.params, cache, tokens[:, PROMPT], bases=b)[1])
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_the_mean_stands_before_the_rotation():
    spec, rng = PLAIN.attention, np.random.default_rng(0)
    basis = jnp.asarray(np.linalg.qr(rng.normal(size=(2, 16, 16)))[0][..., :6], jnp.float32)
    codes, values = (jnp.asarray(rng.normal(size=(1, 2, 30, r)), jnp.float32) for r in (6, 5))
    q, mean = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 2, 8, 8), (4, 8)))
    tokens = CachedTokens(codes, values, jnp.array([30]), Runs(jnp.zeros((1, 2), jnp.int32), jnp.array([[3, 0]])))
    common = dict(scale=0.3, q_positions=jnp.array([[40, 41]]), causal=False, window=None, value_basis=None)
    part = jax.jit(functools.partial(rotary_coefficient_attention, rope=spec.rope, kv_heads=4, key_mean=mean, **common))(
        q, tokens, basis)
    keys = np.einsum("jwr,bjsr->bjsw", basis, codes).reshape(1, 2, 30, 2, 8).swapaxes(2, 3).reshape(1, 4, 30, 8)
    keys = rotate(jnp.asarray(keys) + mean[:, None], *rope_angles(spec.rope, jnp.arange(30) + 3))
    v = np.repeat(np.asarray(values), 2, axis=1)
    out, lse = helpers.softmax_attention(
        q, np.asarray(keys).swapaxes(1, 2), v.swapaxes(1, 2), np.ones((1, 2, 30), bool), 0.3)
    np.testing.assert_allclose(part.out, out, atol=1e-5)
    np.testing.assert_allclose(part.lse, lse, atol=1e-5)


def test_hadamard_turns_change_nothing_until_latents_are_quantised():
    tokens = prompts(length=PROMPT + 8)
    plain, turned = (run(parse_method(f"palu:{ENDS},hadamard={h}"), PLAIN, tokens, PROMPT, width=8)[1]
                     for h in ("false", "true"))
    np.testing.assert_allclose(plain, turned, atol=2e-4)
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(128, 32)) * np.r_[np.full(2, 30.0), np.ones(30)]  # two components far above the others
    spread = latents @ hadamard_blocks(32)
    assert np.abs(spread).max(0).max() / np.abs(spread).max(0).min() < 3 < np.abs(latents).max(0).max() / 3
    assert np.allclose(hadamard_blocks(24) @ hadamard_blocks(24).T, np.eye(24))
    with pytest.raises(ValueError, match="rank 7 is odd"):
        parse_method("palu:rank=7,hadamard=true").validate(PLAIN.attention)


# ---- folding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PLAIN, pytest.param(BIASED, marks=pytest.mark.slow)], ids=["plain", "biased"])
def test_folded_and_unfolded_agree(config):
    """Latents from folded W_k, W_v, and the output of folded W_o, are those of coded taps and expanded values."""
    method, bases = fitted("palu:rank=0.5,head_group=2,sinks=0,recent=0,mean=true", config)
    tokens = prompts(length=64)
    taps = next(iterate_taps(config, model(config).params, tokens))
    cache, _ = prefill(method, config, model(config).params, tokens, bases=bases, dtype=jnp.float32)
    state, own, spec = cache.groups[0], bases[0], config.attention
    attention = model(config).params["layers"][0]["attention"]
    folded = fold_layer(spec, attention, own)
    for side, kernel, bias in (("k", folded.k_kernel, folded.k_bias), ("v", folded.v_kernel, folded.v_bias)):
        latents = (taps.x @ kernel + bias).reshape(2, 64, 2, -1).swapaxes(1, 2)
        np.testing.assert_allclose(getattr(state.store.tokens, side)[:, :, :64], latents, atol=1e-5)
    q, positions = taps.q[:, -1:], jnp.full((2, 1), 64)
    whole = attend(machine_of(method), cache.layout, own, state, q, positions)
    o = attention["o_proj"]
    unfolded = whole.out.reshape(2, 1, -1) @ o["kernel"] + o.get("bias", 0.0)
    latent = jax.jit(functools.partial(
        rotary_coefficient_attention, rope=spec.rope, kv_heads=spec.kv_heads, scale=spec.scale, q_positions=positions,
        causal=False, window=None, key_mean=own.k_mean))(q, cached_tokens(state.store.tokens), own.k)
    np.testing.assert_allclose(latent.out.reshape(2, 1, -1) @ folded.o_kernel + folded.o_bias, unfolded, atol=1e-5)


def test_normed_keys_are_coded_but_not_folded():
    """Qwen3: the norm stands between W_k and RoPE; latents of what RoPE reads are exact at full rank (the contract)."""
    method, bases = fitted("palu:rank=1.0", QWEN)
    taps = next(iterate_taps(QWEN, model(QWEN).params, prompts(1, 24)))
    codes = project(bases[0].k, taps.k_pre)
    np.testing.assert_allclose(method.frame(QWEN.attention, bases[0], None).rebuild("k", codes, 4).swapaxes(1, 2), taps.k_pre, atol=1e-5)
    with pytest.raises(ValueError, match="norm of the keys stands between"):
        fold_layer(QWEN.attention, model(QWEN).params["layers"][0]["attention"], bases[0])


# ---- compositions, calibration, bad input -----------------------------------------------------------


def test_it_is_a_codec_of_compositions():
    full, tokens = parse_method("full"), prompts(length=PROMPT + 16)
    method = parse_method(f"palu:rank=1.0,mean=true,{ENDS}+snapkv:keep=1.0,sinks=4,recent=8")
    moments = random_moments(PLAIN)
    rng = np.random.default_rng(3)
    moments = moments._replace(k_pre_sum=rng.normal(size=(3, 32)), v_sum=rng.normal(size=(3, 32)))
    bases = method.fit(PLAIN.attention, moments)
    assert bases[0].k_mean is not None
    outs = []
    for m, b in ((method, bases), (full, None)):
        cache, _ = prefill(m, PLAIN, model().params, tokens[:, :PROMPT], bases=b, capacity=CAPACITY, block=8,
                           dtype=jnp.float32)
        cache, _ = extend(m, PLAIN, model().params, cache, tokens[:, PROMPT : PROMPT + 8], bases=b)
        cache = refresh(m, cache, bases=b)
        outs.append(extend(m, PLAIN, model().params, cache, tokens[:, PROMPT + 8 :], bases=b)[1])
    np.testing.assert_allclose(*outs, atol=1e-4)


def test_a_killed_calibration_goes_on_where_it_stopped(tmp_path, monkeypatch):
    tiny = types.SimpleNamespace(
        config=PLAIN, params=model().params, tokenizer=Characters(), fingerprint="f", name="tiny")
    method = parse_method("palu:rank=0.25,rank_by=fisher-sqrt,rank_multiple=4")
    arguments = dict(texts=[TEXT], length=64, windows=3, dtype=jnp.float32)
    whole = calibrate(tiny, method, **arguments)
    seen = []
    for target, name, stop in (("lowrank_kv_jax.calibration.calibrate", "iterate_taps", 2), ("lowrank_kv_jax.calibration.fisher", "_of_sequence", 1)):
        module = importlib.import_module(target)
        original, calls = getattr(module, name), [0]

        def interrupted(*args, original=original, calls=calls, stop=stop):
            calls[0] += 1
            if calls[0] > stop:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                calibrate(tiny, method, **arguments, resume=tmp_path / "bases")
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
    assert seen == [["bases.moments.npz"], ["bases.fisher.npz", "bases.moments.npz"]]
    with pytest.raises(ValueError, match="holds the unfinished calibration of"):
        calibrate(tiny, method, **{**arguments, "windows": 2}, resume=tmp_path / "bases")
    counted = [0]
    module = importlib.import_module("lowrank_kv_jax.calibration.calibrate")

    def counting(*args, original=module.iterate_taps):
        counted[0] += 1
        return original(*args)

    monkeypatch.setattr(module, "iterate_taps", counting)
    again = calibrate(tiny, method, **arguments, resume=tmp_path / "bases")
    assert counted[0] == 0 and not list(tmp_path.iterdir())  # all moments were there, and nothing is left behind
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (tmp_path / "bases.moments.npz").write_text("something else")
    with pytest.raises(ValueError, match="no unfinished calibration"):
        calibrate(tiny, method, **arguments, resume=tmp_path / "bases")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("palu:head_group=3", "head_group=3: must divide the model's 4 kv heads: 1, 2, 4"),
        ("palu:head_group=0", "head_group=0: must be an int of at least 1"),
        ("palu:heads=joint", "give head_group"),
        ("palu:rank_by=magic", "rank_by='magic': allowed are uniform, fisher, fisher-sqrt, fisher-roots"),
        ("palu:jitter=1e-6", "palu has no field 'jitter'"),
        ("palu:rank=0.5,rank_by=fisher,rank_multiple=5", "rank_multiple=5: must divide the width of the bases, 32"),
        ("palu:rank=7,rank_by=fisher", "total rank of 42 over 6 matrices in multiples of 8"),
        ("palu:energy=0.9,rank_by=fisher", "not together with energy"),
        ("palu:rank=40", "rank=40"),
    ],
)
def test_bad_input_is_told_with_what_is_allowed(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec).validate(PLAIN.attention)


def test_a_method_that_does_not_suit_the_model_is_refused_before_the_model_runs():
    without_weights = types.SimpleNamespace(config=PLAIN)
    methods = [parse_method("palu"), parse_method("palu:head_group=3")]
    with pytest.raises(ValueError, match="head_group=3: must divide the model's 4 kv heads"):
        moments_for(without_weights, methods, np.zeros((1, 8), np.int32))
