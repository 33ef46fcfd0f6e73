"""KVzip: the second reading against a float64 oracle, what stays, and that the prompt's own states do not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions
from helpers import PLAIN, WINDOWED, model, prompts, random_moments

from lowrank_kv_jax.accounting import cache_bytes
from lowrank_kv_jax.evals.prefill_many import prefill_many
from lowrank_kv_jax.forward import decode_step, prefill, read_layer, start_reading
from lowrank_kv_jax.parse import parse_method
from lowrank_kv_jax.selection import reread
from lowrank_kv_jax.spec import Taps


def oracle(q, k, v, length, size, chunk, window, scale):
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
            weights = np.exp(logits - logits.max())
            out[i, n] = weights @ v[slots, h] / weights.sum()
            for s, share, counts in zip(slots, weights / weights[near].sum(), near, strict=True):
                if counts and s < size and s // chunk == i // chunk:
                    votes[h, s] = max(votes[h, s], share)
    return out, votes


@pytest.mark.parametrize("size, chunk, window", [(70, 2048, None), (300, 128, None), (150, 64, 40)])
def test_the_second_reading(monkeypatch, size, chunk, window):
    monkeypatch.setattr(reread, "CHUNK", chunk)
    rng, lengths = np.random.default_rng(0), np.array([size, size - 37], np.int32)
    q = rng.normal(size=(2, size, 4, 8)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2 * size, 2, 8)).astype(np.float32) for _ in range(2))
    out, votes = reread.reread_attention(*map(jnp.asarray, (q, k, v, lengths)), scale=0.7, window=window)
    for row, length in enumerate(lengths):
        expected, shares = oracle(*(x[row].astype(np.float64) for x in (q, k, v)), length, size, chunk, window, 0.7)
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
    method, lengths = parse_method("kvzip:budget=30,sinks=4"), jnp.array([96, 60], jnp.int32)
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


def test_it_composes_and_forks_from_one_prefill():
    """uniform budgets go with a low-rank codec; many methods read the prompt twice together."""
    specs = ["full", "kvzip:keep=0.5", "static-pca-h:rank=1.0,sinks=4,recent=8+kvzip:keep=1.0,allocation=uniform",
             "xkv:group=3,rank=1.0,sinks=4,recent=8+kvzip:keep=0.5,allocation=uniform"]
    methods = {spec: parse_method(spec) for spec in specs}
    params, tokens, lengths = model().params, prompts(), jnp.array([96, 60])
    bases = {spec: method.fit(PLAIN.attention, random_moments(PLAIN)) for spec, method in methods.items()}
    options = dict(capacity=128, block=16, dtype=jnp.float32)
    caches, logits = prefill_many(methods, PLAIN, params, tokens, lengths, bases=bases, **options)
    out = {}
    for spec, method in methods.items():
        own, alone = prefill(method, PLAIN, params, tokens, lengths, bases=bases[spec], **options)
        np.testing.assert_allclose(alone, logits, atol=1e-5)
        token = jnp.array([3, 5])
        _, out[spec] = decode_step(method, PLAIN, params, own, token, bases=bases[spec])
        _, again = decode_step(method, PLAIN, params, caches[spec], token, bases=bases[spec])
        np.testing.assert_allclose(again, out[spec], atol=1e-5)
    np.testing.assert_allclose(out[specs[2]], out["full"], atol=1e-4)
    full, half = (
        cache_bytes(prefill(methods[spec], PLAIN, params, tokens, lengths, dtype=jnp.float32)[0]).total
        for spec in specs[:2]
    )
    assert half < 0.75 * full


@pytest.mark.parametrize(
    "spec, said",
    [
        ("kvzip:allocation=official", "allocation='official': allowed are kvpress, uniform"),
        ("kvzip:decoding=evict", "decoding='evict': must be 'keep'"),
        ("ojakv+kvzip", "heads with budgets of their own"),
    ],
)
def test_bad_settings(spec, said):
    with pytest.raises(ValueError, match=said):
        parse_method(spec)


def test_a_prompt_too_long_to_be_read_twice():
    config = dataclasses.replace(PLAIN, context=160)
    with pytest.raises(ValueError, match="96 tokens, read twice, needs 192 positions; the model's context has 160"):
        prefill(parse_method("kvzip"), config, model().params, prompts())


def test_taps_without_a_second_reading_are_refused():
    x = jnp.zeros((1, 8, 4, 8))
    with pytest.raises(ValueError, match="no votes of a second reading"):
        parse_method("kvzip").prompt_scores(None, Taps(x, x, x, x, x), jnp.array([8]))
