"""The attention ops against float64 NumPy: any length, capacity, window, basis and storage dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import reference, rotary_coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.reference import TOGETHER
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import Runs

N, K, D, SCALE = 4, 2, 8, 0.35
ROPE = RopeSpec(1000.0, 6, "linear", 2.0)  # two channels stay unrotated

coefficients = jax.jit(coefficient_attention, static_argnames=("scale", "causal", "window"))
rotary = jax.jit(
    rotary_coefficient_attention, static_argnames=("rope", "kv_heads", "scale", "causal", "window")
)
prompt = jax.jit(causal_attention, static_argnames=("scale", "window"))


def interesting_lengths(size):
    return np.array([x for x in (0, 1, 2, 511, 512, 513, 1024, size - 1, size) if 0 <= x <= size], np.int32)


def make_tokens(rng, lengths, size, keys, values, garbage=0.0, dtype=jnp.float32):
    """A segment; `keys` and `values` are (heads, width). Slots beyond a row's length hold `garbage`."""
    batch = len(lengths)
    stale = np.arange(size)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = (
        np.where(stale, garbage, rng.normal(size=(batch, heads, size, width)))
        for heads, width in (keys, values)
    )
    start = rng.integers(0, size + 1, (batch, 2))
    jump = rng.integers(0, 9, (batch, 2))
    runs = Runs(jnp.asarray(start, jnp.int32), jnp.asarray(jump, jnp.int32))
    slots = np.arange(size)
    positions = slots[None] + sum((slots[None] >= start[:, p : p + 1]) * jump[:, p : p + 1] for p in range(2))
    return CachedTokens(jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(lengths), runs), positions


def visible(lengths, positions, q_positions, causal, window):
    mask = np.broadcast_to(
        (np.arange(positions.shape[1]) < lengths[:, None])[:, None, :],
        (*q_positions.shape, positions.shape[1]),
    ).copy()
    if causal:
        mask &= positions[:, None, :] <= q_positions[:, :, None]
    if window is not None:
        mask &= positions[:, None, :] > q_positions[:, :, None] - window
    return mask


def last_positions(lengths, positions, queries):
    """Queries at the positions of the last tokens of each row (clipped for rows that are shorter)."""
    index = np.clip(lengths[:, None] - queries + np.arange(queries), 0, positions.shape[1] - 1)
    return np.take_along_axis(positions, index, axis=1).astype(np.int32)


def rotated(x, positions):
    """float64 rotation of `[B, S, K, D]` by complex multiplication."""
    half = ROPE.rotary_dim // 2
    turn = np.exp(1j * positions[:, :, None, None] * ROPE.inverse_frequencies())
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)


def by_token(x):
    return np.asarray(x, np.float64).swapaxes(1, 2)


def check(partial, oracle, atol=2e-5):
    out, lse = oracle
    np.testing.assert_allclose(partial.out, out, atol=atol)
    np.testing.assert_allclose(partial.lse, lse, atol=atol)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1300])
@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 7), (False, 600)])
def test_stored_space_attention(size, causal, window):
    rng = np.random.default_rng(size)
    everything = interesting_lengths(size)
    batch, queries = len(everything), 3
    for lengths in (
        everything,
        np.minimum(everything, 1),
        np.zeros_like(everything),
    ):  # one program, short rows too
        tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D), garbage=1e30)
        q = rng.normal(size=(batch, queries, N, D)).astype(np.float32)
        at = last_positions(lengths, positions, queries)
        partial = coefficients(q, tokens, scale=SCALE, q_positions=at, causal=causal, window=window)
        mask = visible(lengths, positions, at, causal, window)
        check(partial, softmax_attention(q, by_token(tokens.keys), by_token(tokens.values), mask, SCALE))


@pytest.mark.parametrize(
    "keys, values", [((1, 5), (K, 3)), ((K, 3), (1, 5)), ((1, 4), (1, 6)), ((N, 2), (1, 3))]
)
@pytest.mark.parametrize("size", [40, 600])
def test_keys_and_values_may_differ_in_heads_and_width(size, keys, values):
    rng = np.random.default_rng(1)
    lengths = np.array([0, 17, size], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, keys, values)
    q = rng.normal(size=(3, 2, N, keys[1])).astype(np.float32)
    at = last_positions(lengths, positions, 2)
    partial = coefficients(q, tokens, scale=SCALE, q_positions=at, causal=False, window=None)
    mask = visible(lengths, positions, at, False, None)
    check(partial, softmax_attention(q, by_token(tokens.keys), by_token(tokens.values), mask, SCALE))


@pytest.mark.parametrize("size", [30, 511, 1300])
@pytest.mark.parametrize(
    "groups, per_row, rope, rebuild_values, window",
    [
        (K, False, ROPE, False, None),
        (K, True, ROPE, True, 9),
        (1, False, ROPE, True, None),
        (1, True, ROPE, False, 9),
        (K, True, None, True, None),
        (1, False, None, False, 600),
    ],
)
def test_rebuilt_and_rotated_keys(size, groups, per_row, rope, rebuild_values, window):
    rng = np.random.default_rng(size)
    lengths = interesting_lengths(size)
    batch, rank, value_rank = len(lengths), 5, 3
    width = K // groups * D

    def basis(r):
        return rng.normal(size=(*([batch] if per_row else []), groups, width, r)).astype(np.float32) / 3

    def rebuilt(u, c):
        x = np.einsum(
            "bjsr,bjwr->bsjw", np.asarray(c, np.float64), np.broadcast_to(u, (batch, *u.shape[-3:]))
        )
        return x.reshape(batch, size, K, D)

    k_basis, v_basis = basis(rank), basis(value_rank)
    values = (groups, value_rank) if rebuild_values else (1, 6)
    tokens, positions = make_tokens(rng, lengths, size, (groups, rank), values, garbage=1e30)
    q = rng.normal(size=(batch, 2, N, D)).astype(np.float32)
    at = last_positions(lengths, positions, 2)
    partial = rotary(
        q,
        tokens,
        k_basis,
        rope=rope,
        kv_heads=K,
        scale=SCALE,
        q_positions=at,
        causal=True,
        window=window,
        value_basis=v_basis if rebuild_values else None,
    )
    keys = rebuilt(k_basis, tokens.keys)
    keys = keys if rope is None else rotated(keys, positions)
    v = rebuilt(v_basis, tokens.values) if rebuild_values else by_token(tokens.values)
    with np.errstate(over="ignore", invalid="ignore"):
        check(
            partial,
            softmax_attention(q, keys, v, visible(lengths, positions, at, True, window), SCALE),
            atol=1e-4,
        )


@pytest.mark.parametrize("queries", [1, TOGETHER // N + 1])
def test_rebuilt_keys_of_several_blocks(queries, monkeypatch):
    """Of one row, whose product is a plain one; few queries meet all heads in one product, many head by head."""
    monkeypatch.setattr(reference, "LARGEST", 256)
    rng, size, lengths = np.random.default_rng(8), 700, np.array([690], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (1, 5), (1, 6), garbage=1e30)
    basis = rng.normal(size=(1, K * D, 5)).astype(np.float32) / 3
    q = rng.normal(size=(1, queries, N, D)).astype(np.float32)
    at = last_positions(lengths, positions, queries)
    partial = rotary_coefficient_attention(
        q, tokens, basis, rope=ROPE, kv_heads=K, scale=SCALE, q_positions=at, causal=True, window=None
    )
    keys = (by_token(tokens.keys)[:, :, 0] @ basis[0].T.astype(np.float64)).reshape(1, size, K, D)
    with np.errstate(over="ignore", invalid="ignore"):
        mask = visible(lengths, positions, at, True, None)
        check(partial, softmax_attention(q, rotated(keys, positions), by_token(tokens.values), mask, SCALE), atol=1e-4)


def test_a_long_sequence_of_queries_is_causal_among_themselves():
    rng, size, queries = np.random.default_rng(5), 700, 33
    lengths = np.array([33, 512, 545, 700], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D))
    q = rng.normal(size=(4, queries, N, D)).astype(np.float32)
    at = last_positions(lengths, positions, queries)
    partial = coefficients(q, tokens, scale=SCALE, q_positions=at, causal=True, window=None)
    mask = visible(lengths, positions, at, True, None)
    assert 0 < mask[0].sum() < mask[0].size
    check(partial, softmax_attention(q, by_token(tokens.keys), by_token(tokens.values), mask, SCALE))


@pytest.mark.parametrize("scale", [1e-3, 40.0])
def test_logits_of_any_size(scale):
    rng, size = np.random.default_rng(6), 600
    lengths = np.array([600, 3], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D))
    q = 10 * rng.normal(size=(2, 1, N, D)).astype(np.float32)
    at = last_positions(lengths, positions, 1)
    partial = coefficients(q, tokens, scale=scale, q_positions=at, causal=True, window=None)
    mask = visible(lengths, positions, at, True, None)
    check(
        partial, softmax_attention(q, by_token(tokens.keys), by_token(tokens.values), mask, scale), atol=5e-3
    )


@pytest.mark.parametrize("size", [40, 700])
def test_bfloat16_storage_is_widened_on_read(size):
    rng = np.random.default_rng(7)
    lengths = np.array([size, 13], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D), dtype=jnp.bfloat16)
    q = rng.normal(size=(2, 1, N, D)).astype(np.float32)
    at = last_positions(lengths, positions, 1)
    partial = coefficients(q, tokens, scale=SCALE, q_positions=at, causal=True, window=None)
    assert partial.out.dtype == partial.lse.dtype == jnp.float32
    mask = visible(lengths, positions, at, True, None)
    check(partial, softmax_attention(q, by_token(tokens.keys), by_token(tokens.values), mask, SCALE))


def test_bfloat16_queries_accumulate_in_float32():
    rng, size = np.random.default_rng(8), 700
    lengths = np.array([size], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D), dtype=jnp.bfloat16)
    q = jnp.asarray(rng.normal(size=(1, 1, N, D)), jnp.bfloat16)
    at = last_positions(lengths, positions, 1)
    partial = coefficients(q, tokens, scale=SCALE, q_positions=at, causal=True, window=None)
    mask = visible(lengths, positions, at, True, None)
    oracle = softmax_attention(
        q.astype(jnp.float32), by_token(tokens.keys), by_token(tokens.values), mask, SCALE
    )
    assert partial.lse.dtype == jnp.float32
    check(partial, oracle, atol=1e-2)


def test_stale_keys_may_even_be_nan():
    """Masked logits are replaced. (Stale *values* must be finite: their weight is 0, and 0 NaN = NaN.)"""
    rng, size = np.random.default_rng(9), 600
    lengths = np.array([513, 2], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D))
    stale = jnp.arange(size)[None, None, :, None] >= lengths[:, None, None, None]
    q, at = rng.normal(size=(2, 1, N, D)).astype(np.float32), last_positions(lengths, positions, 1)
    common = dict(scale=SCALE, q_positions=at, causal=True, window=None)
    clean = coefficients(q, tokens, **common)
    dirty = coefficients(q, tokens._replace(keys=jnp.where(stale, jnp.nan, tokens.keys)), **common)
    np.testing.assert_array_equal(clean.out, dirty.out)


@pytest.mark.parametrize(
    "size, window",
    [
        (1, None),
        (40, 5),
        (511, None),
        (512, 1),
        pytest.param(513, None, marks=pytest.mark.slow),
        (513, 600),
        (1100, None),
        pytest.param(1100, 5, marks=pytest.mark.slow),
        (1100, 600),
    ],
)
def test_prompt_attention(size, window):
    rng = np.random.default_rng(size)
    q = rng.normal(size=(2, size, N, D)).astype(np.float32)
    k, v = (rng.normal(size=(2, size, K, D)).astype(np.float32) for _ in range(2))
    i = np.arange(size)
    mask = i[None, :] <= i[:, None]
    if window is not None:
        mask &= i[None, :] > i[:, None] - window
    oracle, _ = softmax_attention(q, k, v, np.broadcast_to(mask, (2, size, size)), SCALE)
    np.testing.assert_allclose(prompt(q, k, v, scale=SCALE, window=window), oracle, atol=2e-5)


def test_work_follows_the_length_not_the_capacity():
    """Blocks beyond the longest row are not read: poison there, even infinite, cannot be seen."""
    rng, size = np.random.default_rng(10), 2000
    lengths = np.array([300, 100], np.int32)
    tokens, positions = make_tokens(rng, lengths, size, (K, D), (K, D))
    poisoned = tokens._replace(
        keys=tokens.keys.at[:, :, 1024:].set(jnp.nan), values=tokens.values.at[:, :, 1024:].set(jnp.nan)
    )
    q, at = rng.normal(size=(2, 1, N, D)).astype(np.float32), last_positions(lengths, positions, 1)
    attend = functools.partial(coefficients, q, scale=SCALE, q_positions=at, causal=True, window=None)
    np.testing.assert_array_equal(attend(tokens).out, attend(poisoned).out)
