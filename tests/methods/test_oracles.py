"""The papers' formulas, written down again in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, QWEN, bases_for, model, prompts, random_moments, rebuilt, run, softmax_attention, transported

from lowrank_kv_jax.attention.importance import most_important, window_attention
from lowrank_kv_jax.attention.rope import RopeSpec, rope_angles, rotate
from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.estimators import ESTIMATORS
from lowrank_kv_jax.estimators.linalg import orthonormalise
from lowrank_kv_jax.estimators.moments import Moments, layer_moments, whole_moments
from lowrank_kv_jax.estimators.oja import oja_update
from lowrank_kv_jax.estimators.svd import principal_subspace, second_moment
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.methods import REGISTRY, machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.basis import expand_values, fold_query, project, reconstruct


def orthonormal(rng, *shape):
    return np.linalg.qr(rng.normal(size=shape))[0]


# ---- OjaKV, Algorithm 1 ----------------------------------------------------------------------------


def oja_step(u, x, eta, normalize):
    """Lines 4 and 6 for one head: columns of `x` `[W, T]` are the selected tokens."""
    if normalize == "token":
        coded = u.T @ x
        u = u + eta * sum(
            np.outer(x[:, t] - u @ coded[:, t], coded[:, t]) / (x[:, t] @ x[:, t]) for t in range(x.shape[1])
        )
    else:
        coded = u.T @ x
        spectrum = np.linalg.eigvalsh(coded @ coded.T)
        divisors = {"largest": spectrum[-1], "residual": spectrum[-1], "median": np.median(spectrum)}
        eta = eta / divisors.get(normalize, 1)
        decay = 0 if normalize in ("largest", "median") else 1  # the orthonormalisation does without
        u = u + eta * (x - decay * u @ coded) @ coded.T
    q, r = np.linalg.qr(u)
    return q * np.sign(np.diag(r))


@pytest.mark.parametrize(
    "normalize, eta",
    [("none", 0.01), ("none", 0.1), ("token", 0.1), ("residual", 1.0), ("largest", 1.0), ("median", 1.0)],
)
def test_oja_step(normalize, eta):
    rng = np.random.default_rng(0)
    basis = np.stack([[orthonormal(rng, 6, 3) for _ in range(2)] for _ in range(3)])
    x, weight = rng.normal(size=(3, 9, 2, 6)), np.ones((3, 9))
    weight[1, 5:] = 0
    weight[2] = 0
    moved = jax.jit(oja_update, static_argnums=(3, 4))(basis, x, weight, eta, normalize)
    for b, tokens in ((0, 9), (1, 5)):
        for j in range(2):
            np.testing.assert_allclose(
                moved[b, j], oja_step(basis[b, j], x[b, :tokens, j].T, eta, normalize), atol=2e-5
            )
    np.testing.assert_allclose(moved[2], basis[2], atol=1e-6)  # no token, no step
    gram = np.einsum("bjwr,bjwp->bjrp", moved, moved)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(3), gram.shape), atol=1e-5)


def test_the_literal_rule_with_large_activations_leaves_the_principal_subspace():
    """Why the default is normalised: with eta ||C|| >> 1 the step overshoots into the complement."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(1, 200, 1, 16)) * np.geomspace(30, 0.3, 16)).astype(np.float32)
    start, _ = np.linalg.qr(np.eye(16, 4) + 0.2 * rng.normal(size=(16, 4)))

    def energy_lost(u):
        rest = x[0, :, 0] - x[0, :, 0] @ np.asarray(u) @ np.asarray(u).T
        return (rest**2).sum() / (x**2).sum()

    lost = {
        rule: energy_lost(oja_update(start[None, None], x, jnp.ones((1, 200)), eta, rule)[0, 0])
        for rule, eta in (("none", 0.1), ("median", 1.0))
    }
    assert lost["none"] > 2 * energy_lost(start)
    assert lost["median"] < 0.5 * energy_lost(start)


def test_importance_is_attention_of_the_last_queries():
    """Section 5.2: s_t = sum over heads and the last w queries of softmax(Q K^T / sqrt d)."""
    rng, (kv, dim, window) = np.random.default_rng(2), (2, 4, 5)
    q, k = rng.normal(size=(3, 20, 2 * kv, dim)), rng.normal(size=(3, 20, kv, dim))
    lengths = np.array([20, 9, 3], np.int32)
    scores = np.asarray(jax.jit(window_attention, static_argnums=3)(q, k, lengths, window, scale=dim**-0.5))
    for b, n in enumerate(lengths):
        expected = np.zeros((kv, 20))
        for i in range(max(n - window, 0), n):
            for head in range(2 * kv):
                logits = k[b, : i + 1, head // 2] @ q[b, i, head] * dim**-0.5
                weights = np.exp(logits - logits.max())
                expected[head // 2, : i + 1] += weights / weights.sum()
        np.testing.assert_allclose(scores[b], expected, atol=1e-5)


def test_the_most_important_come_first():
    index, weight = most_important(
        jnp.array([[0.1, 3.0, 2.0, 5.0], [1.0, 0.0, 0.0, 0.0]]), jnp.array([3, 1]), 3
    )
    assert index[0].tolist() == [3, 1, 2] and index[1, 0] == 0
    assert weight.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("size", [7, 600])
def test_transport(size):
    """C <- C U_old^T U_new for every stored token; another basis of the same subspace changes nothing."""
    rng = np.random.default_rng(3)
    old, new = (np.stack([[orthonormal(rng, 6, 4) for _ in range(2)] for _ in range(2)]) for _ in range(2))
    c, lengths = rng.normal(size=(2, 2, size, 4)).astype(np.float32), np.array([size, size // 2], np.int32)
    moved = np.asarray(jax.jit(transported)(c, lengths, old, new))
    expected = np.einsum("bjsr,bjwr,bjwp->bjsp", c, old, new)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(moved[b, :, :n], expected[b, :, :n], atol=1e-5)
    turned = old @ orthonormal(rng, 4, 4)
    there = jax.jit(transported)(c, lengths, old, turned)
    np.testing.assert_allclose(
        np.einsum("bjsr,bjwr->bjsw", there, turned)[0], np.einsum("bjsr,bjwr->bjsw", c, old)[0], atol=1e-5
    )


@pytest.mark.parametrize("spec", ["rank=0.6,bits=4", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("rank=0.6", "rank=0.6,bits=8"))])
def test_rows_without_new_tokens_keep_their_coefficients(spec):
    """To the bit, in 16 bits too: bases that are rounded are not quite orthonormal."""
    method = parse_method(f"ojakv:{spec},sinks=2,recent=4")
    one = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
    bases, params, tokens = bases_for(method, one), model(one).params, prompts(2, 96)
    cache, _ = prefill(method, one, params, tokens, bases=bases, capacity=400, block=16)
    first = [jax.tree.map(np.asarray, group.store.tokens) for group in cache.groups]
    for _ in range(6):
        counts = np.array([16, 0])
        cache, _ = extend(method, one, params, cache, tokens[:, :16], counts, bases=bases)
        cache = refresh(method, cache, bases=bases)
    for before, after in zip(first, cache.groups, strict=True):
        for was, now in zip(jax.tree.leaves((before.k, before.v)), jax.tree.leaves((after.store.tokens.k, after.store.tokens.v)), strict=True):
            np.testing.assert_array_equal(np.asarray(now)[1], was[1])


def test_transport_between_rounded_bases_of_one_subspace_loses_nothing():
    """Sixty times; without dividing by U^T U, which rounding moves off 1, the loss would grow with every one."""
    rng = np.random.default_rng(0)
    old = jnp.asarray(orthonormal(rng, 1, 1, 64, 24), jnp.bfloat16)
    turned = jnp.asarray(np.asarray(old, np.float32) @ orthonormal(rng, 24, 24), jnp.bfloat16)
    start = rng.normal(size=(1, 1, 40, 24)).astype(np.float32)
    c, lengths, move = jnp.asarray(start), jnp.array([40]), jax.jit(transported)
    for _ in range(30):
        c = move(move(c, lengths, old, turned), lengths, turned, old)
    assert np.abs(np.asarray(c) - start).max() < 0.02


# ---- OjaKV, A.2 and A.3 ----------------------------------------------------------------------------


def activations(rng, spec, tokens):
    def draw(heads):
        mix = (
            rng.normal(size=(heads, spec.head_dim, spec.head_dim))
            * np.geomspace(3, 0.05, spec.head_dim)[:, None]
        )
        return np.einsum("thd,hde->the", rng.normal(size=(tokens, heads, spec.head_dim)), mix)

    return draw(spec.q_heads), draw(spec.kv_heads), draw(spec.kv_heads)


@pytest.mark.parametrize("energy", [0.6, 0.9, 0.99])
def test_calibrated_bases_are_right_singular_vectors_of_queries_and_keys(energy):
    """A.2, rows of Q and K stacked; the smallest rank that keeps the energy, then the layer's maximum."""
    rng = np.random.default_rng(4)
    spec = AttentionSpec(2, 4, 2, 6, RopeSpec(100.0, 6), 64, (None, None))
    layers, sums = [], []
    for _ in range(2):
        q, k, v = activations(rng, spec, 50)
        layers.append((q, k, v))
        taps = Taps(*(jnp.asarray(x[None], jnp.float32) for x in (q, k, k, v, v)))
        sums.append(whole_moments(layer_moments(spec, taps, jnp.arange(50)[None], jnp.ones((1, 50), bool))))
    moments = Moments(50, **{name: np.stack([s[name] for s in sums]) for name in sums[0]})
    bases = REGISTRY["static-pca-h"](rank=None, energy=energy).fit(spec, moments)
    for (q, k, v), basis in zip(layers, bases, strict=True):
        for u, rows in (
            (basis.k, [np.concatenate([q[:, 2 * h], q[:, 2 * h + 1], k[:, h]]) for h in range(2)]),
            (basis.v, [v[:, h] for h in range(2)]),
        ):
            ranks = []
            for h, matrix in enumerate(rows):
                _, values, vectors = np.linalg.svd(matrix, full_matrices=False)
                share = np.cumsum(values**2) / (values**2).sum()
                ranks.append(int(np.argmax(share >= energy)) + 1)
                r = u.shape[-1]
                projector = np.asarray(u[h], np.float64) @ np.asarray(u[h], np.float64).T
                np.testing.assert_allclose(projector, vectors[:r].T @ vectors[:r], atol=2e-3)
            assert u.shape[-1] == max(ranks)


def test_moments_of_queries_before_rope():
    """k and v as they are; q turned back to where it stood before RoPE; invalid tokens left out."""
    rng, spec = np.random.default_rng(5), QWEN.attention
    positions = jnp.arange(7)[None] + 3
    q_pre, k_pre, v = (
        jnp.asarray(rng.normal(size=(1, 7, heads, spec.head_dim)), jnp.float32)
        for heads in (spec.q_heads, spec.kv_heads, spec.kv_heads)
    )
    cos, sin = rope_angles(spec.rope, positions[:, :, None])
    taps = Taps(rotate(q_pre, cos, sin), rotate(k_pre, cos, sin), k_pre, v, v)
    got = whole_moments(layer_moments(spec, taps, positions, jnp.arange(7)[None] < 5))
    flat = np.asarray(k_pre[0, :5], np.float64).reshape(5, -1)
    np.testing.assert_allclose(got["k_pre"], flat.T @ flat, atol=1e-4)
    grouped = np.asarray(q_pre[0, :5], np.float64).reshape(5, spec.kv_heads, -1, spec.head_dim)
    np.testing.assert_allclose(got["q_pre"], np.einsum("tkgd,tkge->kde", grouped, grouped), atol=1e-4)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("per_row", [False, True])
def test_both_compute_orders_agree(groups, per_row):
    """A.3: Q K^^T = Q~ K~^T and O^ = O~ U_v^T, for bases of one head, of some heads and of all."""
    rng, (batch, kv, dim) = np.random.default_rng(6), (2, 4, 6)
    width = kv // groups * dim
    rows = (batch,) if per_row else ()
    u_k, u_v = (
        np.linalg.qr(rng.normal(size=(*rows, groups, width, r)))[0].astype(np.float32) for r in (5, 3)
    )
    q, k, v = (
        rng.normal(size=(batch, n, heads, dim)).astype(np.float32) for n, heads in ((3, 8), (9, kv), (9, kv))
    )
    (c_k, c_v), mask = (jax.jit(project)(*side) for side in ((u_k, k), (u_v, v))), np.ones((batch, 3, 9), bool)
    rebuild, fold, expand = (jax.jit(f, static_argnums=2) for f in (reconstruct, fold_query, expand_values))
    rebuilt = [np.asarray(rebuild(u, c, kv)).swapaxes(1, 2) for u, c in ((u_k, c_k), (u_v, c_v))]
    for u, x, back in ((u_k, k, rebuilt[0]), (u_v, v, rebuilt[1])):
        flat = x.reshape(batch, 9, groups, width)
        u = np.broadcast_to(u, (batch, groups, width, u.shape[-1]))
        np.testing.assert_allclose(
            back, np.einsum("btjw,bjwr,bjxr->btjx", flat, u, u).reshape(x.shape), atol=1e-5
        )
    slow, lse = softmax_attention(q, *rebuilt, mask, 0.4)
    reduced, reduced_lse = softmax_attention(
        fold(u_k, q, kv), np.asarray(c_k).swapaxes(1, 2), np.asarray(c_v).swapaxes(1, 2), mask, 0.4
    )
    np.testing.assert_allclose(lse, reduced_lse, atol=1e-5)
    np.testing.assert_allclose(expand(u_v, reduced.astype(np.float32), kv), slow, atol=1e-5)


@pytest.mark.parametrize("heads", ["per_head", "joint"])
def test_methods_that_differ_in_compute_order_only_agree(heads):
    """Eigen-N attends in the reduced space, StaticPCA rebuilds: at any rank the same logits."""
    tokens = prompts(length=60)
    logits = [
        run(REGISTRY[name](rank=0.4, heads=heads), PLAIN, tokens, 52, capacity=68, width=4)[1]
        for name in ("eigen-n", "static-pca")
    ]
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_prompt_fitted_bases_are_optimal():
    """The principal subspace leaves the energy of the remaining singular values, weights leave tokens out."""
    rng = np.random.default_rng(7)
    x, weight = rng.normal(size=(2, 30, 2, 6)), np.ones((2, 30))
    weight[1, 12:] = 0
    u = np.asarray(
        principal_subspace(second_moment(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)), 4)
    )
    for b, n in ((0, 30), (1, 12)):
        for j in range(2):
            rows = x[b, :n, j]
            rest = rows - rows @ u[b, j] @ u[b, j].T
            np.testing.assert_allclose((rest**2).sum(), (np.linalg.svd(rows)[1][4:] ** 2).sum(), rtol=1e-4)


def test_orthonormalise_keeps_span_and_signs():
    a = np.random.default_rng(8).normal(size=(3, 6, 4))
    q = np.asarray(orthonormalise(jnp.asarray(a)), np.float64)
    r = np.einsum("bwr,bwp->brp", q, a)
    np.testing.assert_allclose(q @ r, a, atol=1e-5)
    assert (np.diagonal(r, axis1=1, axis2=2) > 0).all()


# ---- StreamingLLM ----------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_streaming_attends_over_keys_rotated_at_cache_indices(positions):
    """Every step rotates the retained keys anew at their index in the cache, as the paper does."""
    sinks, recent, prompt, steps, block = 3, 6, 14, 20, 4
    rope, rng = RopeSpec(50.0, 4), np.random.default_rng(9)
    spec = AttentionSpec(1, 2, 1, 4, rope, 4096, (None,))
    method = REGISTRY["streamingllm"](budget=sinks + recent, keep=None, sinks=sinks, positions=positions)
    layout = Layout(spec, 1, prompt, 64, block, "float32")
    total = prompt + steps
    q, k, v = (rng.normal(size=(1, total, heads, 4)).astype(np.float32) for heads in (2, 1, 1))

    def turned(x, at):
        cos, sin = rope_angles(rope, jnp.asarray(at, jnp.int32))
        return rotate(jnp.asarray(x), cos[:, None], sin[:, None])

    everywhere = np.arange(total)
    q_post, k_post = turned(q, everywhere), turned(k, everywhere)

    def taps(a, b):
        return Taps(q_post[:, a:b], k_post[:, a:b], jnp.asarray(k[:, a:b]), jnp.asarray(v[:, a:b]), None)

    @jax.jit
    def compress(taps, lengths):
        return machine_of(method).compress(layout, None, machine_of(method).init(layout, None), (taps,), lengths)

    @jax.jit
    def refresh(state):
        return machine_of(method).refresh(layout, None, state)

    @jax.jit
    def step(state, taps, at):
        state = machine_of(method).append(layout, None, state, taps, jnp.array([1], jnp.int32), at, Place())
        return state, machine_of(method).attend(layout, None, state, taps.q, at, Place())

    state = compress(taps(0, prompt), jnp.array([prompt], jnp.int32))
    for t in range(prompt, total):
        state, partial = step(state, taps(t, t + 1), jnp.array([[t]], jnp.int32))
        kept = [i for i in range(t + 1) if i < sinks or i > t - recent]
        at = np.arange(len(kept)) if positions == "cache" else np.array(kept)
        query = turned(q[:, t : t + 1], at[-1:])
        oracle, lse = softmax_attention(
            query, turned(k[:, kept], at), v[:, kept], np.ones((1, 1, len(kept))) > 0, 0.5
        )
        np.testing.assert_allclose(partial.out, oracle, atol=2e-5)
        np.testing.assert_allclose(partial.lse, lse, atol=2e-5)
        if (t - prompt) % block == block - 1:
            state = refresh(state)


def test_random_bases_are_orthonormal_and_of_the_asked_ranks():
    method = REGISTRY["ojakv"](rank_k=3, rank_v=0.5, heads="per_head")
    for basis in bases_for(method):
        assert basis.k.shape == (4, 8, 3) and basis.v.shape == (4, 8, 4)
        for u in basis[:2]:
            np.testing.assert_allclose(
                np.einsum("jwr,jwp->jrp", u, u),
                np.broadcast_to(np.eye(u.shape[-1]), (4, u.shape[-1], u.shape[-1])),
                atol=1e-5,
            )
    with pytest.raises(ValueError, match="rank_v=9: must lie in 1..8"):
        REGISTRY["ojakv"](rank_v=9, heads="per_head").fit(PLAIN.attention, random_moments(PLAIN))
    with pytest.raises(ValueError, match="rank=33: must lie in 1..32"):
        REGISTRY["single-svd"](rank=33).validate(model().config.attention)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "covariance" else []) for name in sorted(set(ESTIMATORS) - {"oja"})]
)
def test_ojakv_with_another_estimator_follows_the_prompt_and_decoded_tokens(name):
    """Coefficients of an online estimator rebuild the coded tokens better than the calibrated basis does."""
    spec = f"ojakv:rank=4,sinks=2,recent=4,estimator={name}"
    tokens = prompts(length=120, seed=3, vocab=PLAIN.vocab_size)
    method = parse_method(spec)
    learned, logits = run(method, PLAIN, tokens, 72)
    still, _ = run(dataclasses.replace(method, eta_pre=0, eta_dec=0), PLAIN, tokens, 72)
    exact, _ = run(REGISTRY["full"](), PLAIN, tokens, 72)
    assert np.isfinite(logits).all()
    errors = {cache is learned: _rebuilt_error(cache, exact) for cache in (learned, still)}
    assert errors[True] < 0.9 * errors[False]


def _rebuilt_error(cache, exact):
    """Relative squared error of the coded values, over all layers."""
    lost = total = 0.0
    for mine, layer, bases in zip(cache.groups, exact.groups, bases_for(cache.method), strict=True):
        count = int(mine.store.tokens.length[0])
        v = np.asarray(rebuilt(cache.method, cache.layout, bases, mine.store)[1], np.float64)[:, :, :count]
        true = np.asarray(layer.ends[0].v, np.float64)[:, :, cache.method.sinks : cache.method.sinks + count]
        lost, total = lost + ((v - true) ** 2).sum(), total + (true**2).sum()
    return lost / total
