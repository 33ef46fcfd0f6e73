"""The Triton kernels, interpreted on a CPU, against float64: ranks, lengths, dtypes, positions, poisoned buffers."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention
from jax.experimental import pallas as pl
from kernel_cases import SCALE, Case, check, make, make_owned, newest, slow

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to, coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.segments.exact import Slots
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.eight_bits import eight_bits_of
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import Tile

ROPE = RopeSpec(10000.0, 64)
LLAMA3 = RopeSpec(500000.0, 48, "llama3", 8.0, 1.0, 4.0, 64)  # 16 of 64 channels stay unrotated

SOME = (((8, 3), (4, 4), (2, 5), (1, 35)), ((8, 7), (2, 33)))  # whole words, of which no run is whole
MANY = (((8, 40), (4, 150), (2, 212)), ((4, 140), (1, 78)))  # programs of several warps


KIVI = (Tile(32, 1), Tile(1, 32))


def run(op, *args, **options):
    return jax.jit(functools.partial(op, backend="triton", **options))(*args)


def by_kernel(x):
    """The op before RoPE, of which no other way is taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(rotary_coefficient_attention, x.q, x.tokens, x.basis, **x.options)


@pytest.mark.parametrize(
    "case",
    [
        newest(Case(rank_k=38, rank_v=48)),  # no power of two nor a sum of a few
        Case(rank_k=96, rank_v=16, dtype="bfloat16", S=256, lengths=(255, 256)),
        Case(rank_k=64, rank_v=128, dtype="float16", lengths=(300, 2), J=1),
        slow(Case(rank_k=128, rank_v=256, J=2, Jv=1, lengths=(130,))),
        slow(Case(rank_k=520, rank_v=608, J=1, Jv=1, lengths=(33,), dtype="bfloat16")),  # the last piece is half there
        Case(T=3, causal=True, window=70, lengths=(1, 2, 3, 100, 101, 300), rank_k=48),
        slow(Case(T=2, causal=True, gaps=(200, 7), jumps=(9, 2), lengths=(8, 199, 202))),
        newest(Case(bits=8, rank_k=64, rank_v=32, lengths=(0, 1, 128, 129, 300))),
        Case(S=1300, lengths=(1300, 513, 0), N=8),  # several splits
        Case(runs=SOME, lengths=(0, 1, 63, 64, 65, 300), dtype="float16"),
        Case(runs=SOME, lengths=(20, 7), S=20, dtype="bfloat16"),  # fewer tokens than a tile has
        slow(Case(runs=MANY, J=1, Jv=1, N=24, lengths=(300, 130), dtype="bfloat16")),  # more rows than a program has
        slow(Case(runs=(SOME[1], SOME[0]), T=3, causal=True, window=70, lengths=(1, 2, 101, 300), S=600, N=8, dtype="float16")),
        newest(Case(bits=2, tiles=KIVI, rank_k=40, rank_v=128, lengths=(0, 1, 33, 128, 161, 300))),
        slow(Case(bits=4, tiles=KIVI, rank_k=64, rank_v=40, lengths=(0, 127, 129), T=3, causal=True, window=70)),
        slow(Case(bits=8, tiles=(Tile(1, None), Tile(1, None)), rank_k=64, lengths=(1, 129), dtype="bfloat16")),
        slow(Case(bits=4, lengths=(0, 129, 300), rank_k=40, rank_v=160, J=1)),  # coefficients
        slow(Case(bits=2, tiles=(Tile(16, 1), Tile(1, 4)), lengths=(17, 129), rank_v=20)),
        *(slow(Case(rank_k=r, rank_v=r, lengths=(256, 257), dtype="bfloat16")) for r in (16, 32, 48, 64, 96, 128)),
    ],
    ids=str,
)
def test_coefficients(case):
    x = make(case)
    check(run(coefficient_attention, x.q, x.tokens, **x.options), x.oracle, case.dtype)


@pytest.mark.parametrize(
    "case",
    [
        slow(Case(rope=ROPE)),
        newest(Case(rope=ROPE, D=96, rank_k=48, gaps=(0, 128), jumps=(100000, 9), lengths=(128, 129, 300))),
        Case(rope=LLAMA3, J=1, Jv=1, rank_k=96, rank_v=64, per_row=True, N=8, K=4, gaps=(64, 70), jumps=(7, 11)),
        Case(rope=ROPE, T=3, causal=True, window=90, lengths=(2, 101, 300), bits=8),
        Case(rope=ROPE, D=96, rank_k=20, mean=True, gaps=(0, 64), jumps=(100000, 9), lengths=(0, 64, 65, 300)),
        slow(Case(rope=None, per_row=True, mean=True, rank_k=20, lengths=(300, 5))),
        slow(Case(rope=None, per_row=True, rank_k=20, dtype="bfloat16", lengths=(300, 5))),
        Case(rope=ROPE, rank_k=330, J=1, rank_v=40, Jv=1, mean=True, lengths=(0, 140, 300), dtype="bfloat16"),  # by two kernels
        slow(Case(rope=ROPE, rank_k=330, own=1, J=1, Jv=2, T=2, lengths=(140, 300), dtype="float16", D=96, per_row=True)),
        slow(Case(rope=ROPE, rank_k=600, J=1, rank_v=80, Jv=1, D=256, lengths=(140,), dtype="bfloat16")),  # in parts
        slow(Case(rope=ROPE, rank_k=330, J=2, T=3, causal=True, window=90, lengths=(101, 300), N=8, dtype="bfloat16")),
        slow(Case(rope=ROPE, D=128, rank_k=256, J=1, rank_v=384, Jv=1, lengths=(140,), dtype="bfloat16")),  # a joint basis, in pieces
        Case(rope=LLAMA3, own=2, rank_k=20, mean=True, lengths=(0, 1, 129, 300)),
        slow(Case(rope=ROPE, own=1, rank_k=20, D=96, mean=True, per_row=True, T=2, lengths=(0, 64, 65, 300))),
        slow(Case(rope=ROPE, own=2, bits=8, rank_k=64, lengths=(1, 300))),
        slow(Case(rope=ROPE, own=4, J=1, Jv=1, N=8, K=4, rank_k=96, lengths=(140, 2), dtype="bfloat16")),
        slow(Case(rope=ROPE, own=2, J=2, Jv=4, K=4, S=1300, lengths=(1300, 513), D=128)),  # each for two heads; splits
    ],
    ids=str,
)
def test_rotary(case):
    x = make(case)
    check(run(rotary_coefficient_attention, x.q, x.tokens, x.basis, **x.options), x.oracle, case.dtype)


WIDE = 4  # values in 8 bits are numbers of some ten: what rounded weights differ by is as much larger
PACKED = Case(rope=ROPE, runs=SOME, lengths=(0, 1, 63, 64, 65, 300), dtype="bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(PACKED, mean=True, per_row=True, gaps=(0, 64), jumps=(100000, 9)),
        newest(dataclasses.replace(PACKED, lengths=(20, 7), S=20, D=96, dtype="float16")),  # fewer tokens than a tile has
        slow(dataclasses.replace(PACKED, own=2, mean=True, lengths=(1, 129, 300), rope=LLAMA3)),
        dataclasses.replace(PACKED, runs=MANY, J=1, Jv=1, N=24, K=8, lengths=(300, 130), gaps=(70, 90), jumps=(3, 40)),
        slow(dataclasses.replace(PACKED, runs=MANY, J=1, Jv=1, K=2, D=256, lengths=(300, 130), mean=True)),  # in parts
        slow(dataclasses.replace(PACKED, T=3, causal=True, window=90, lengths=(2, 101, 300), N=8, S=600)),
        slow(dataclasses.replace(PACKED, own=1, J=1, Jv=2, K=2, T=2, lengths=(0, 64, 300), dtype="float16", per_row=True)),
        slow(dataclasses.replace(PACKED, rope=None, per_row=True, mean=True, lengths=(300, 5))),
        slow(dataclasses.replace(PACKED, S=1300, lengths=(1300, 513), mean=True)),  # splits
    ],
    ids=str,
)
def test_packed_keys_before_rope(case):
    """Rebuilt by one kernel, attended by another; a sink's gap within a tile, runs that share one, a joint basis."""
    x = make(case)
    found = by_kernel(x)
    out, lse = x.oracle
    check(found._replace(out=found.out / WIDE), (out / WIDE, lse), case.dtype)


@pytest.mark.slow
def test_packed_keys_before_rope_may_be_of_any_size():
    """Scaled by a power of two, and their queries back, they are the same numbers: none becomes too large or too small."""
    x = make(dataclasses.replace(PACKED, mean=True, lengths=(300,)))

    def found(size):
        options = x.options | {"key_mean": x.options["key_mean"] * size}
        q, basis = (y.astype(jnp.bfloat16) for y in (x.q / size, x.basis * size))
        return run(rotary_coefficient_attention, q, x.tokens, basis, **options)

    for size in (2.0**-40, 2.0**20):
        for own, one in zip(found(size), found(1.0), strict=True):
            np.testing.assert_array_equal(own, one)


TURNED = Case(turned=True, rope=ROPE, mean=True, runs=SOME, gaps=(0, 900), jumps=(4, 0), dtype="bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(TURNED, lengths=(0, 1, 256, 257, 570, 600), S=600, per_row=True),
        newest(dataclasses.replace(TURNED, lengths=(20, 7), S=20, rope=LLAMA3, gaps=(0, 5000), jumps=(3000, 0))),
        slow(dataclasses.replace(TURNED, lengths=(300, 130), runs=MANY, J=1, Jv=1, N=24, K=8, mean=False, T=1)),
        dataclasses.replace(TURNED, lengths=(300,), runs=MANY, J=1, Jv=1, N=12, K=2, T=3, causal=True, mean=False),
        slow(dataclasses.replace(TURNED, lengths=(1500, 101), S=1500, T=3, causal=True, window=400, N=8, rope=LLAMA3)),
    ],
    ids=str,
)
def test_keys_turned_by_their_place_in_a_tile(case):
    """Tiles of tokens that meet queries of their own, of which the last is shorter; a mean apart."""
    x = make(case)
    found = by_kernel(x)
    check(found, x.oracle, case.dtype)


@pytest.mark.parametrize("bits", [pytest.param(None, marks=pytest.mark.newest), 4, pytest.param(2, marks=pytest.mark.slow)])
def test_heads_of_unequal_budgets(bits):
    """Head after head in one buffer, with two slots that changed hands, or with tiles that begin with each head."""
    x = make_owned(bits=bits)
    check(run(coefficient_attention, x.q, x.tokens, **x.options), x.oracle)


def test_tokens_whose_scale_is_behind_their_codes():
    """As exact ends are held in 8 bits; of a part of their buffer, and rows beyond the length as large as bytes are."""
    x = make(Case(rank_k=40, rank_v=40, lengths=(0, 1, 127, 130, 300), poison=False))
    rows = [eight_bits_of(y, jnp.float32) for y in x.tokens[:2]]
    keys, values = (np.asarray(y.widened(), np.float64).swapaxes(1, 2) for y in rows)
    stale = (np.arange(300) >= np.asarray(x.tokens.lengths)[:, None])[:, None, :, None]
    keys_of, values_of = (y.moved(lambda held: jnp.where(stale, jnp.uint8(255), held)) for y in rows)
    seen = ~stale.reshape(5, 1, 300)
    tokens = x.tokens._replace(keys=keys_of, values=values_of)
    check(run(coefficient_attention, x.q, tokens, **x.options), softmax_attention(x.q, keys, values, seen, SCALE))
    part = CachedTokens(Slots(keys_of, 100, 260), Slots(values_of, 100, 260), jnp.minimum(x.tokens.lengths, 90), x.tokens.positions)
    seen = np.arange(160) < np.minimum(np.asarray(x.tokens.lengths), 90)[:, None, None]
    wanted = softmax_attention(x.q, keys[:, 100:260], values[:, 100:260], seen, SCALE)
    found = coefficient_attention(x.q, part, backend="triton", **x.options)
    whole = np.asarray(x.tokens.lengths) >= 190  # of the others some of these slots are stale
    check(AttnPartial(*(y[whole] for y in found)), [y[whole] for y in wanted])


def test_a_head_without_tokens_reads_none():
    """Neither the tile before the buffer nor its scales, which may be NaN, as those behind the last token may."""
    x = make_owned(lengths=((5, 0, 130), (40, 3, 0)), bits=4)

    def poisoned(side, tiles):
        beyond = np.arange(side.shape[2]) >= np.asarray(tiles)[:, None]
        return jnp.where(beyond[:, None, :, None], jnp.uint16(0x7FC0), side)

    stored = (
        dataclasses.replace(y, scales=poisoned(y.scales, tiles), lows=poisoned(y.lows, tiles))
        for y, tiles in zip(x.tokens[:2], ((6, 3), (135, 43)), strict=True)
    )
    tokens = x.tokens._replace(**dict(zip(("keys", "values"), stored, strict=True)))
    check(run(coefficient_attention, x.q, tokens, **x.options), x.oracle)


BESIDE = {
    "splits": lambda: make(Case(S=1300, lengths=(1300, 513, 0), N=8)),
    "one split": lambda: make(Case(T=3, causal=True, window=70, lengths=(1, 100, 301), rank_v=48)),
    "tiles": lambda: make(Case(bits=2, tiles=KIVI, rank_k=40, rank_v=100, lengths=(0, 33, 300))),
    "components": lambda: make(Case(runs=SOME, lengths=(0, 64, 300), dtype="float16")),
    "heads of unequal budgets": make_owned,
}


@pytest.mark.parametrize("stored, slots", [
    pytest.param("splits", 40, marks=pytest.mark.newest), ("one split", 150),
    *((name, 40) for name in ("tiles", "components", "heads of unequal budgets")), pytest.param("one split", 40, marks=pytest.mark.slow),
    *(pytest.param(name, 150, marks=pytest.mark.slow) for name in BESIDE if name != "one split"),
])
def test_other_tokens_are_read_by_the_same_program(stored, slots, monkeypatch):
    """As the merge of both: of rows that see tokens here, there, on both sides and on none."""
    x = BESIDE[stored]()
    others, poisoned = _beside(x, slots)
    programs, call = [], pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: programs.append(1) or call(*args, **options))
    found = run(coefficient_attention, x.q, x.tokens, beside=poisoned, **x.options)
    assert len(programs) == 1 + hasattr(x.tokens.values, "runs")
    parts = x.oracle, [np.asarray(y, np.float64) for y in attend_to(others, scale=SCALE, backend="xla")]
    with np.errstate(divide="ignore"):
        total = np.logaddexp(*(lse for _, lse in parts))
    safe = np.where(np.isneginf(total), 0, total)
    check(found, (sum(np.exp(lse - safe)[..., None] * out for out, lse in parts), total), x.q.dtype.name)


def _beside(x, slots):
    """Exact tokens beside those of `x`, with zeros and with NaN beyond the valid ones."""
    rng, (batch, queries, q_heads, _), dim = np.random.default_rng(1), x.q.shape, x.tokens.values.shape[-1]
    heads = getattr(x.tokens.positions, "kv_heads", None) or x.tokens.keys.shape[1]
    lengths = jnp.asarray(([0, slots - 7, 9] * batch)[:batch], jnp.int32)
    valid = (jnp.arange(slots) < lengths[:, None])[:, None, :, None]
    sides = [jnp.asarray(rng.normal(size=(batch, heads, slots, dim)), x.q.dtype) for _ in range(2)]
    q, none = jnp.asarray(rng.normal(size=(batch, queries, q_heads, dim)), x.q.dtype), jnp.zeros((batch, 2), jnp.int32)
    at = (lengths[:, None] - queries + jnp.arange(queries)).astype(jnp.int32)

    def beside(beyond):
        tokens = CachedTokens(*(jnp.where(valid, side, beyond) for side in sides), lengths, Runs(none, none))
        return Beside(q, tokens, at, causal=queries > 1)

    return beside(0), beside(jnp.nan)


def test_a_part_of_a_buffer_is_read_where_it_lies():
    """Slots 100 to 260, their positions counted from there; no slice of them is an array."""
    x = make(Case(S=300, lengths=(300, 130), rank_k=64, rank_v=64, gaps=(0, 100), jumps=(0, 0), poison=False))
    part = CachedTokens(*(Slots(y, 100, 260) for y in x.tokens[:2]), jnp.asarray([160, 30]), x.tokens.positions)
    alone = part._replace(keys=x.tokens.keys[:, :, 100:260], values=x.tokens.values[:, :, 100:260])
    found = coefficient_attention(x.q, part, backend="triton", **x.options)
    wanted = coefficient_attention(x.q, alone, backend="triton", **x.options)
    np.testing.assert_allclose(found.out, wanted.out, atol=1e-6)
    np.testing.assert_allclose(found.lse, wanted.lse, atol=1e-6)

    def program(keys, values):
        tokens = part._replace(keys=Slots(keys, 100, 260), values=Slots(values, 100, 260))
        return coefficient_attention(x.q, tokens, backend="triton", **x.options)

    assert "2,160,64" not in str(jax.make_jaxpr(program)(*x.tokens[:2]))
