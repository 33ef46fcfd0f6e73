"""Inputs for the attention kernels with NaN in every slot beyond a row's length, and their float64 answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.turning import TILE
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.lanes import tokens_on_lanes
from lowrank_kv_jax.storage.packed import empty_packed, hold_packed
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import COEFFICIENTS, Tile, read_tokens, store_tokens
from lowrank_kv_jax.storage.water_filled import WaterFilled, WidthRuns, components_of, pack, unpack

SCALE = 0.3
store = jax.jit(store_tokens, static_argnums=(1, 2, 3))
read = jax.jit(read_tokens)
pack_codes, unpack_codes = (jax.jit(f, static_argnums=1) for f in (pack, unpack))
positions_at = jax.jit(lambda where, slots: where.at(slots))


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape; N query heads, J and J' stored heads, T queries, S slots; rope only for the rotary op."""

    J: int = 2
    Jv: int = 2
    rank_k: int = 32
    rank_v: int = 32
    lengths: tuple[int, ...] = (0, 1, 127, 128, 129, 300)
    S: int = 300
    N: int = 4
    K: int = 2
    D: int = 64
    T: int = 1
    dtype: str = "float32"
    causal: bool = False
    window: int | None = None
    rope: RopeSpec | None = None
    bits: int | None = None
    tiles: tuple[Tile, Tile] = (COEFFICIENTS, COEFFICIENTS)  # what shares a scale in those bits, of keys and of values
    runs: tuple[WidthRuns, WidthRuns] | None = None  # packed keys and values, whose components are as many
    mean: bool = False
    turned: bool = False  # keys but for their mean are stored turned by their place in tiles, from the first position on
    gaps: tuple[int, int] = (0, 100)
    jumps: tuple[int, int] = (3, 5)
    own: int | None = None  # stored heads that have positions of their own each, in no order, instead of runs
    per_row: bool = False
    poison: bool = True


def newest(case: Case):
    """A case that `.ci/run` runs once more on the newest JAX: of each kernel one or two."""
    return pytest.param(case, marks=pytest.mark.newest)


def slow(case: Case):
    """A case that the default run leaves out: interpreted kernels take seconds each, most of it compilation."""
    return pytest.param(case, marks=pytest.mark.slow)


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: jnp.ndarray
    tokens: CachedTokens
    basis: jnp.ndarray
    options: dict
    oracle: tuple[np.ndarray, np.ndarray]


def make(case: Case, seed: int = 0) -> Inputs:
    """Inputs of `coefficient_attention`, and with `rope` or a basis of those of the rotary op."""
    if case.runs is not None:
        case = dataclasses.replace(case, rank_k=components_of(case.runs[0]), rank_v=components_of(case.runs[1]))
    rng, batch, S = np.random.default_rng(seed), len(case.lengths), case.S
    lengths = np.asarray(case.lengths, np.int32)
    dtype = jnp.dtype(case.dtype)
    k, v = (
        rng.normal(size=(batch, J, S, r)) for J, r in ((case.J, case.rank_k), (case.Jv, case.rank_v))
    )
    stale = np.arange(S)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = (np.where(stale, 0.0, x) for x in (k, v))
    where = Runs(*(jnp.asarray([x] * batch, jnp.int32) for x in (case.gaps, case.jumps)))
    if case.own is not None:
        where = _without_order(case, lengths)
    if case.runs is not None:
        return _packed(case, rng, (k, v), lengths, where)
    keys, values = (store(x.astype(np.float32), case.bits, dtype, t) for x, t in zip((k, v), case.tiles, strict=True))
    exact = [np.asarray(read(x), np.float64) for x in (keys, values)]
    if case.bits is None and case.poison:
        keys, values = (jnp.asarray(np.where(stale, np.asarray(np.nan, x.dtype), x)) for x in (keys, values))
    elif case.poison:  # tiles beyond the length: their scales, the bits of bfloat16 numbers, are NaN
        keys, values = (_poisoned(x, lengths) for x in (keys, values))
    return _inputs(case, rng, exact, CachedTokens(keys, values, jnp.asarray(lengths), where), lengths)


def _without_order(case, lengths):
    """Positions of each head, in 21 bits; any number beyond the length."""
    rng, shape = np.random.default_rng(1), (len(lengths), case.own, case.S)
    stale = np.arange(case.S) >= lengths[:, None, None]
    chosen = np.where(stale, rng.integers(-(2**31), 2**31, shape), rng.integers(0, 2**21, shape))
    return PerHead(jnp.asarray(chosen, jnp.int32), None, case.K)


def _poisoned(x, lengths):
    tiles = (np.arange(x.scales.shape[2]) * x.tile.tokens >= lengths[:, None])[:, None, :, None]
    sides = {"scales": x.scales, "lows": x.lows}
    return dataclasses.replace(
        x, **{name: jnp.asarray(np.where(tiles, np.uint16(0x7FC0), y)) for name, y in sides.items() if y is not None})


def _packed(case, rng, sides, lengths, where):
    """Inputs of packed tokens, whose bytes beyond the length are as large as bytes are: no bits of theirs are NaN."""
    stored, exact = [], []
    for x, own in zip(sides, case.runs, strict=True):
        wide = x * np.sqrt(2.0 ** np.concatenate([np.full(count, bits - 1) for bits, count in own]))  # steps that fill them
        codes = pack_codes(jnp.asarray(wide, jnp.float32), own)
        exact.append(np.asarray(unpack_codes(codes, own), np.float64))
        stale = np.arange(case.S)[None, None, :, None] >= lengths[:, None, None, None]
        stored.append(WaterFilled(jnp.asarray(np.where(stale, np.uint8(255), codes)), own))
    return _inputs(case, rng, exact, CachedTokens(*stored, jnp.asarray(lengths), where), lengths)


def _inputs(case, rng, exact, tokens, lengths):
    S, dtype = case.S, jnp.dtype(case.dtype)
    positions = np.asarray(positions_at(tokens.positions, np.arange(S, dtype=np.int32)))
    index = np.clip(lengths[:, None] - case.T + np.arange(case.T), 0, S - 1)
    at = index if case.own else np.take_along_axis(positions, index, axis=1).astype(np.int32)
    mask = np.broadcast_to((np.arange(S) < lengths[:, None])[:, None], (len(lengths), case.T, S)).copy()
    if case.causal:
        mask &= positions[:, None] <= at[:, :, None]
    if case.window is not None:
        mask &= positions[:, None] > at[:, :, None] - case.window
    options = dict(scale=SCALE, q_positions=jnp.asarray(at, jnp.int32), causal=case.causal, window=case.window)
    return Inputs(*_queries(case, rng, exact, positions, mask, dtype, tokens, options))


def lanes(tokens: CachedTokens) -> CachedTokens:
    """The same tokens, transposed as the TPU kernels read them."""
    return tokens._replace(keys=tokens_on_lanes(tokens.keys), values=tokens_on_lanes(tokens.values))


def _queries(case, rng, exact, positions, mask, dtype, tokens, options):
    k, v = exact
    batch, rotary = len(case.lengths), case.rope is not None or case.per_row
    dim = case.D if rotary else case.rank_k
    q = jnp.asarray(rng.normal(size=(batch, case.T, case.N, dim)).astype(dtype))
    wide = np.asarray(q, np.float64)
    basis = None
    if rotary:
        rows = batch if case.per_row else 1
        shape = (rows, case.J, case.K // case.J * case.D, case.rank_k)
        scale = np.sqrt(case.rank_k)
        if case.runs is not None:  # the steps are folded in
            scale = scale * np.sqrt(2.0 ** np.concatenate([np.full(count, bits - 1) for bits, count in case.runs[0]]))
        basis = jnp.asarray((rng.normal(size=shape) / scale).astype(dtype))
        k = np.einsum("bjsr,bjwr->bsjw", k, np.broadcast_to(np.asarray(basis, np.float64), (batch, *shape[1:])))
        k = k.reshape(batch, case.S, case.K, case.D)
        if case.mean:
            mean = jnp.asarray(rng.normal(size=(rows, case.K, case.D)).astype(dtype))
            options["key_mean"] = mean if case.per_row else mean[0]
        around = np.broadcast_to(np.asarray(mean, np.float64)[:, None] if case.mean else 0.0, k.shape)
        if case.turned:
            options["origin"] = case.jumps[0]
            k = rotated(k, positions - np.arange(case.S) % TILE, case.rope) + rotated(around, positions, case.rope)
        else:
            k = k + around if case.rope is None else rotated(k + around, positions, case.rope)
        basis = basis if case.per_row else basis[0]
        options |= dict(rope=case.rope, kv_heads=case.K)
    else:
        k = k.swapaxes(1, 2)
    if not rotary and case.runs is not None:
        scale = np.sqrt(2.0 ** np.concatenate([np.full(count, bits - 1) for bits, count in case.runs[0]]))
        q = (q / jnp.asarray(scale, jnp.float32)).astype(dtype)
        wide = np.asarray(q, np.float64)
    return q, tokens, basis, options, softmax_attention(wide, k, v.swapaxes(1, 2), mask, SCALE)


def rotated(x, positions, rope):
    """float64 rotation of `[B, S, K, D]` at `[B, S]` or `[B, J, S]` by complex multiplication."""
    half, heads = rope.rotary_dim // 2, x.shape[2]
    each = positions[:, None] if positions.ndim == 2 else positions
    each = np.repeat(each, heads // each.shape[1], axis=1).swapaxes(1, 2)
    turn = np.exp(1j * each[..., None] * rope.inverse_frequencies())
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)


def make_owned(lengths=((5, 0, 130), (1, 2, 3), (0, 0, 0)), size=300, rank=32, bits=None) -> Inputs:
    """Inputs of `coefficient_attention` over tokens of K heads behind each other, as many as `lengths` `[B, K]` says.

    The second slot and the one before the last are of each other's head, or with `bits` tokens are coded as KIVI has them,
    in tiles that begin with each head.
    """
    rng, (batch, heads) = np.random.default_rng(0), np.shape(lengths)
    counts = np.asarray(lengths, np.int32).sum(axis=1)
    owner = np.zeros((batch, 1, size), np.int8)
    for row, own in enumerate(lengths):
        owner[row, 0, : counts[row]] = np.repeat(np.arange(heads), own)
        if bits is None and counts[row] > 3:
            owner[row, 0, [1, counts[row] - 2]] = owner[row, 0, [counts[row] - 2, 1]]
    q = rng.normal(size=(batch, 1, 2 * heads, rank)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, 1, size, rank)).astype(np.float32)
    if bits is not None:
        empty = empty_packed(batch, heads, size, rank, bits, 32)
        keys = jax.jit(hold_packed)(empty, jnp.asarray(k), jnp.asarray(owner), jnp.asarray(counts))
        values = store(v, bits, None, Tile(1, 16))
        k, v = (np.asarray(x.read_block(0, size)) for x in (keys, values))
    there = np.arange(size) < counts[:, None]
    mine = (owner[:, 0, None] == np.arange(heads)[:, None]) & there[:, None]  # [B, K, S]
    found = [softmax_attention(q[:, :, 2 * h : 2 * h + 2], k.swapaxes(1, 2), v.swapaxes(1, 2), mine[:, h : h + 1], SCALE)
             for h in range(heads)]
    oracle = tuple(np.concatenate(parts, axis=2) for parts in zip(*found, strict=True))
    if bits is None:
        keys, values = (jnp.asarray(np.where(there[:, None, :, None], x, np.nan)) for x in (k, v))
    where = PerHead(jnp.zeros((batch, 1, size), jnp.int32), jnp.asarray(owner), heads)
    tokens = CachedTokens(keys, values, jnp.asarray(counts), where)
    options = dict(scale=SCALE, q_positions=jnp.asarray(counts[:, None]), causal=False, window=None)
    return Inputs(jnp.asarray(q), tokens, jnp.zeros(()), options, oracle)


def check(partial, oracle, dtype="float32"):
    """Outputs and log-sum-exps within the rounding of the compute dtype; empty rows are exactly (0, -inf)."""
    atol = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    out, lse = oracle
    empty = np.isneginf(lse)
    np.testing.assert_array_equal(np.isneginf(partial.lse), empty)
    np.testing.assert_array_equal(np.asarray(partial.out)[empty], 0)
    np.testing.assert_allclose(partial.out, out, atol=atol)
    np.testing.assert_allclose(np.asarray(partial.lse)[~empty], lse[~empty], atol=atol)
