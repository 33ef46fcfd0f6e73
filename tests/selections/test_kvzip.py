"""KVzip: the second reading against a float64 oracle, what stays, and that the prompt's own states do not change."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions
from helpers import PLAIN, WINDOWED, model, prompts, random_moments
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.calibration.calibrate import fit_bases, moments_for
from lowrank_kv_jax.calibration.layer_votes import EDGES, collect_votes
from lowrank_kv_jax.evals.asking.prefill_many import prefill_many
from lowrank_kv_jax.generation.forward import decode_step, prefill, read_layer, start_reading
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases
from lowrank_kv_jax.selections import reread
from lowrank_kv_jax.selections.layer_shares import STEP, layer_shares


def oracle(q, k, v, length, size, chunk, window, scale, sinks):
    """One row, copy by copy: attention over prompt and copies, and votes among sinks, chunk and copies."""
    heads, kv = q.shape[1], k.shape[1]
    out, votes = np.zeros_like(q), np.zeros((kv, size))
    for i in range(length):
        first = i // chunk * chunk
        at = length + i % chunk
        prompt = [j for j in range(length) if window is None or at - j < window]
        copies = [j for j in range(first, i + 1) if window is None or i - j < window]
        slots = prompt + [size + j for j in copies]
        near = np.array([s >= size or s < reread.SINKS or s // chunk == i // chunk for s in slots])
        for n in range(heads):
            h = n // (heads // kv)
            logits = k[slots, h] @ q[i, n] * scale
            weights, sink = np.exp(logits - logits.max()), np.exp(sinks[n] - logits.max())
            out[i, n] = weights @ v[slots, h] / (weights.sum() + sink)
            for s, share, counts in zip(slots, weights / (weights[near].sum() + sink), near, strict=True):
                if counts and s < size and s // chunk == i // chunk:
                    votes[h, s] = max(votes[h, s], share)
    return out, votes


@pytest.mark.parametrize("size, chunk, window, sinks", [
    (70, 2048, None, None), (300, 128, None, None), (150, 64, 40, (2.0, -1.0, 4.0, 0.5)),
])
def test_the_second_reading(monkeypatch, size, chunk, window, sinks):
    monkeypatch.setattr(reread, "CHUNK", chunk)
    rng, lengths = np.random.default_rng(0), np.array([size, size - 37], np.int32)
    q = rng.normal(size=(2, size, 4, 8)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2 * size, 2, 8)).astype(np.float32) for _ in range(2))
    sinks = None if sinks is None else jnp.asarray(sinks)
    read = jax.jit(functools.partial(reread.reread_attention, scale=0.7, window=window))
    out, votes = read(q, k, v, lengths, sink_logits=sinks)
    logits = np.full(4, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    for row, length in enumerate(lengths):
        own = (x[row].astype(np.float64) for x in (q, k, v))
        expected, shares = oracle(*own, length, size, chunk, window, 0.7, logits)
        np.testing.assert_allclose(out[row, :length], expected[:length], atol=1e-5)
        np.testing.assert_allclose(votes[row], shares, atol=1e-6)


def test_positions_of_the_copies_begin_behind_the_prompt(monkeypatch):
    monkeypatch.setattr(reread, "CHUNK", 4)
    assert reread.reread_positions(jnp.array([6, 3]), 6).tolist() == [[6, 7, 8, 9, 6, 7], [3, 4, 5, 6, 3, 4]]


@pytest.mark.parametrize("config", [PLAIN, WINDOWED], ids=["plain", "windowed"])
def test_the_first_reading_is_as_without_a_second(config):
    params, tokens, lengths = model(config).params, prompts(), jnp.array([96, 41])
    once, twice = (start_reading(config, params, tokens, lengths, twice=x) for x in (False, True))
    for layer in range(config.num_layers):
        once, taps = read_layer(config, params, layer, once)
        twice, again = read_layer(config, params, layer, twice)
        for mine, theirs in zip(taps[:5], again[:5], strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-5)
    assert taps.reread is None and again.reread.shape == (2, config.kv_heads, 96)
    assert float(again.reread.max()) <= 1 and not again.reread[1, :, 41:].any() and again.reread[1, :, :41].all()


def test_the_best_tokens_of_all_heads_stay():
    method, lengths = parse_method("kvzip:budget=30,sinks=4,layers=uniform"), jnp.array([96, 60], jnp.int32)
    params, tokens = model().params, prompts()
    cache, _ = prefill(method, PLAIN, params, tokens, lengths, dtype=jnp.float32)
    reading = start_reading(PLAIN, params, tokens, lengths, twice=True)
    for layer in range(PLAIN.num_layers):
        reading, taps = read_layer(PLAIN, params, layer, reading)
        for row, length in enumerate(lengths.tolist()):
            state = jax.tree.map(lambda x, row=row: x[row : row + 1], cache.groups[layer])
            score = np.asarray(taps.reread[row, :, 4:length])
            best = np.argsort(-score.ravel(), kind="stable")[: 4 * 26]
            expected = [sorted(best[best // score.shape[1] == head] % score.shape[1] + 4) for head in range(4)]
            assert kept_positions(state, 4) == expected


@pytest.mark.slow
def test_it_composes_and_forks_from_one_prefill():
    """uniform budgets go with a low-rank codec; many methods read the prompt twice together."""
    specs = ["full", "kvzip:keep=0.5", "static-pca-h:rank=1.0,sinks=4,recent=8+kvzip:keep=1.0,allocation=uniform,layers=uniform",
             "xkv:group=3,rank=1.0,sinks=4,recent=8+kvzip:keep=0.5,allocation=uniform,layers=uniform"]
    methods = {spec: parse_method(spec) for spec in specs}
    params, tokens, lengths = model().params, prompts(), jnp.array([96, 60])
    bases = {spec: method.fit(PLAIN.attention, random_moments(PLAIN)) for spec, method in methods.items()}
    options = dict(capacity=128, block=16, dtype=jnp.float32)
    caches, logits = prefill_many(methods, PLAIN, params, tokens, lengths, bases=bases, **options)
    out, sizes = {}, {}
    for spec, method in methods.items():
        own, alone = prefill(method, PLAIN, params, tokens, lengths, bases=bases[spec], **options)
        np.testing.assert_allclose(alone, logits[spec], atol=1e-5)
        sizes[spec] = cache_bytes(own).total
        token = jnp.array([3, 5])
        _, out[spec] = decode_step(method, PLAIN, params, own, token, bases=bases[spec])
        _, again = decode_step(method, PLAIN, params, caches[spec], token, bases=bases[spec])
        np.testing.assert_allclose(again, out[spec], atol=1e-5)
    np.testing.assert_allclose(out[specs[2]], out["full"], atol=1e-4)
    assert sizes[specs[1]] < 0.75 * sizes["full"]


@pytest.mark.parametrize(
    "spec, said",
    [
        ("kvzip:allocation=official", "allocation='official': allowed are kvpress, uniform"),
        ("kvzip:decoding=evict", "decoding='evict': allowed are keep, code"),
        ("kvzip:layers=global", "layers='global': allowed are calibrated, uniform"),
        ("kvzip:budget_bytes=90000", "budget_bytes=90000: give layers=uniform"),
    ],
)
def test_bad_settings(spec, said):
    with pytest.raises(ValueError, match=said):
        parse_method(spec)


def test_a_prompt_too_long_to_be_read_twice():
    config = dataclasses.replace(PLAIN, context=160)
    with pytest.raises(ValueError, match="96 tokens, read twice, needs 192 positions; the model's context has 160"):
        prefill(parse_method("kvzip:layers=uniform"), config, model().params, prompts())


def test_taps_without_a_second_reading_are_refused():
    x = jnp.zeros((1, 8, 4, 8))
    with pytest.raises(ValueError, match="no votes of a second reading"):
        parse_method("kvzip").prompt_scores(None, Taps(x, x, x, x, x), jnp.array([8]))


# ---- shares of layers ------------------------------------------------------------------------------------------


def some_votes(layers=5, seed=0):
    """Votes of layers that differ in how many tokens they look at, and the shares above the edges."""
    rng = np.random.default_rng(seed)
    votes = [np.minimum(rng.lognormal(-9 + layer, 1.2, 4000), 0.9) for layer in range(layers)]
    return votes, np.stack([(v[:, None] > EDGES).mean(0) for v in votes])


@pytest.mark.parametrize("keep", [0.05, 0.25, 0.5, 0.9, 1.0])
def test_shares_are_those_of_the_best_votes_of_all_layers(keep):
    votes, above = some_votes()
    best = np.sort(np.concatenate(votes))[::-1][: round(keep * 20000)][-1]
    exact = np.array([(v >= best).mean() for v in votes]) / keep
    shares = np.array([entry.share for entry in layer_shares(above, keep)])
    assert np.abs(shares - np.clip(exact, STEP, None)).max() < 3 * STEP  # layers below a step take theirs from the largest
    assert shares.mean() <= 1 and len(votes) * (1 - shares.mean()) < 2 * STEP
    assert (shares % STEP == 0).all() and shares.min() >= STEP and keep * shares.max() <= 1


@given(above=arrays(np.float64, (7, 12), elements=st.floats(0, 1)), keep=st.floats(0.01, 1.0))
def test_shares_never_spend_more_than_the_budget(above, keep):
    shares = [entry.share for entry in layer_shares(np.sort(above)[:, ::-1], keep)]
    assert sum(shares) <= 7 and min(shares) >= STEP and keep * max(shares) <= 1 + 1e-9


def test_votes_are_counted_as_a_second_reading_casts_them():
    loaded, tokens = model(), np.asarray(prompts(rows=2, length=40))
    above = collect_votes(loaded, tokens)
    assert above.shape == (PLAIN.num_layers, len(EDGES)) and (np.diff(above) <= 0).all() and above[:, -1].max() == 0
    reading = start_reading(PLAIN, loaded.params, jnp.asarray(tokens), jnp.array([40, 40]), twice=True)
    for layer in range(PLAIN.num_layers):
        reading, taps = read_layer(PLAIN, loaded.params, layer, reading)
        votes = np.asarray(taps.reread)[:, :, 4:]
        np.testing.assert_allclose(above[layer], [(votes > edge).mean() for edge in EDGES], atol=0.01)


def test_layers_keep_their_shares(tmp_path):
    """The same bytes as with uniform budgets, spent where calibration says; and again from the disk."""
    even, own = (parse_method(f"kvzip:keep=0.25,layers={layers}") for layers in ("uniform", "calibrated"))
    moments = moments_for(model(), [own], np.asarray(prompts(rows=2, length=96)))
    with pytest.raises(ValueError, match="no votes of a second reading"):
        own.fit(PLAIN.attention, moments._replace(votes=None))
    bases = fit_bases(model(), own, moments._replace(votes=some_votes(PLAIN.num_layers)[1]))
    caches = [prefill(m, PLAIN, model().params, prompts(), bases=b)[0] for m, b in ((even, None), (own, bases))]
    slots = [[state.store.tokens.k.shape[2] for state in cache.groups] for cache in caches]
    average = 96 // 4 - 4
    assert slots[0] == [4 * average + 2] * PLAIN.num_layers
    assert slots[1] == [4 * int(average * entry.share) + 2 for entry in bases] and len(set(slots[1])) > 1
    assert 0.8 * sum(slots[0]) < sum(slots[1]) <= sum(slots[0])
    saved = types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
    save_bases(tmp_path / "b", bases, saved, own)
    assert load_bases(tmp_path / "b", saved, own) == bases
    with pytest.raises(ValueError, match="keep=0.25, this method asks for 0.5"):
        load_bases(tmp_path / "b", saved, parse_method("kvzip:keep=0.5"))
