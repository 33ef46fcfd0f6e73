"""The TPU kernels, interpreted on a CPU with race detection, against float64; memory starts as NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from kernel_cases import SCALE, Case, check, lanes, make, make_owned, newest, slow

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.pages_in_rows import in_pages
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.quantised import Tile

ROPE = RopeSpec(10000.0, 64)
KIVI = (Tile(32, 1), Tile(1, 32))
SOME = (((8, 3), (4, 4), (2, 5), (1, 11)), ((8, 7), (2, 21)))
TURNED = Case(turned=True, rope=ROPE, mean=True, gaps=(0, 5000), jumps=(4, 0))
MANY = (((8, 40), (4, 150), (2, 200)), ((4, 140), (1, 70)))  # planes that begin behind other runs


@pytest.fixture(autouse=True)
def no_races():
    yield
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found


def run(op, *args, **options):
    return jax.jit(functools.partial(op, backend="tpu", **options))(*args)


@pytest.mark.parametrize(
    "case",
    [
        slow(Case(rank_k=32, rank_v=48)),
        slow(Case(rank_k=96, rank_v=16, dtype="bfloat16", J=1, lengths=(300, 2, 0))),
        Case(T=3, causal=True, window=70, lengths=(0, 1, 101, 300), rank_k=16, rank_v=128),
        newest(Case(runs=SOME, lengths=(0, 1, 129, 300))),
        slow(Case(runs=MANY, J=1, Jv=1, N=24, lengths=(300, 130), S=2500, dtype="bfloat16")),
        newest(Case(bits=8, rank_k=32, rank_v=64, lengths=(0, 1, 127, 129, 300))),
        Case(bits=2, tiles=KIVI, rank_k=40, rank_v=128, lengths=(0, 1, 33, 128, 161, 300)),
        slow(Case(bits=4, tiles=KIVI, rank_k=64, rank_v=40, lengths=(2500, 1025, 0), S=2500, T=3, causal=True, window=70)),
        slow(Case(bits=8, tiles=(Tile(1, None), Tile(1, None)), rank_k=64, lengths=(1, 129), dtype="bfloat16")),
        slow(Case(bits=4, lengths=(0, 129, 300), rank_k=40, rank_v=160, J=1)),  # coefficients
        slow(Case(bits=2, tiles=(Tile(24, 1), Tile(1, 4)), lengths=(17, 129, 2000), S=2000, rank_v=20)),
        slow(Case(bits=8, rank_k=64, rank_v=96, J=1, dtype="bfloat16", S=4200, lengths=(4200, 2049), window=2100, T=2)),
        Case(S=2500, lengths=(2500, 1, 1025), rank_k=128, rank_v=128, N=2),  # three tiles, the last one beyond the buffer
    ],
    ids=str,
)
def test_coefficients(case):
    x = make(case)
    check(run(coefficient_attention, x.q, lanes(x.tokens), **x.options), x.oracle, case.dtype)


@pytest.mark.parametrize(
    "case",
    [
        newest(Case(rope=ROPE, S=1100, lengths=(1, 511, 513, 1100), gaps=(0, 600), jumps=(100000, 9))),
        slow(Case(rope=RopeSpec(500000.0, 48), J=1, Jv=1, rank_k=96, per_row=True, N=8, K=4, gaps=(64, 70), lengths=(0, 300))),
        slow(Case(rope=ROPE, mean=True, lengths=(1, 300), J=1, Jv=1)),
        slow(Case(rope=ROPE, runs=MANY, mean=True, J=1, Jv=1, gaps=(0, 130), jumps=(100000, 9), lengths=(0, 300))),
        slow(Case(rope=ROPE, bits=8, lengths=(1, 300), gaps=(0, 130), jumps=(100000, 9))),
        slow(Case(rope=ROPE, bits=4, rank_k=40, lengths=(1, 300), gaps=(0, 130), jumps=(100000, 9))),
        slow(Case(rope=ROPE, bits=2, tiles=KIVI, lengths=(1100, 513), S=1100, gaps=(0, 600), jumps=(100000, 9))),
        slow(Case(rope=None, per_row=True, rank_k=16, dtype="bfloat16", lengths=(300, 5))),
        Case(rope=ROPE, own=2, mean=True, lengths=(0, 1, 511, 600), S=600),
        slow(Case(rope=RopeSpec(500000.0, 48), own=1, J=1, Jv=1, runs=MANY, mean=True, per_row=True, T=2, lengths=(130, 300))),
        slow(Case(rope=ROPE, own=2, bits=8, lengths=(1, 300))),
        slow(Case(rope=ROPE, own=8, J=8, Jv=4, N=32, K=16, lengths=(300, 2), dtype="bfloat16")),  # each for two heads
        slow(Case(rope=ROPE, own=16, J=1, Jv=1, N=16, K=16, lengths=(140,))),  # positions in two registers
        dataclasses.replace(TURNED, runs=SOME, lengths=(0, 256, 257, 600), S=600, per_row=True),
        slow(dataclasses.replace(TURNED, runs=MANY, J=1, Jv=1, N=24, K=8, lengths=(300, 130), mean=False, dtype="bfloat16")),
        slow(dataclasses.replace(
            TURNED, rank_k=40, J=1, lengths=(900, 101), S=900, T=3, causal=True, window=400, rope=RopeSpec(500000.0, 48))),
    ],
    ids=str,
)
def test_rotary(case):
    x = make(case)
    check(run(rotary_coefficient_attention, x.q, lanes(x.tokens), x.basis, **x.options), x.oracle, case.dtype)


@pytest.mark.parametrize("options", [
    pytest.param({"lengths": ((5, 0, 130),)}, marks=pytest.mark.newest),
    pytest.param({"bits": 4}, marks=pytest.mark.slow),
    pytest.param({"bits": 2, "lengths": ((900, 3, 700), (1, 1500, 0)), "size": 1700}, marks=pytest.mark.slow),
    pytest.param({"bits": 8, "rank": 64}, marks=pytest.mark.slow),
])
def test_heads_of_unequal_budgets(options):
    """Head after head in one buffer, with two slots that changed hands, or with tiles that begin with each head."""
    x = make_owned(**options)
    check(run(coefficient_attention, x.q, lanes(x.tokens), **x.options), x.oracle)


@pytest.mark.slow
def test_all_pages_in_order():
    """As rows are read where a window or a chunk sees no pages but tokens."""
    x = make(Case(S=400, lengths=(400, 130, 0), rank_k=128, rank_v=128, T=3, causal=True, window=70))
    rows = x.tokens._replace(keys=in_pages(x.tokens.keys, 8, "exact"), values=in_pages(x.tokens.values, 8, "exact"))
    check(run(coefficient_attention, x.q, rows, **x.options), x.oracle)


@pytest.mark.slow
@pytest.mark.parametrize("page, dtype, stored", [
    (8, "bfloat16", 1), (16, "bfloat16", 2), (24, "float32", 2),
])
def test_chosen_pages(page, dtype, stored):
    """More of them than a step fetches, of 2 units that share `stored` heads; NaN in every token that none of them reads."""
    rng, there, count = np.random.default_rng(0), 32, 20
    q, (k, v) = rng.normal(size=(2, 1, 4, 128)), rng.normal(size=(2, 2, stored, there * page, 128))
    q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k, v))
    chosen = np.stack([[np.sort(rng.choice(there, count, replace=False)) for _ in range(2)] for _ in range(2)])
    lengths = np.array([count * page - 3, 2 * page + 1])
    chosen[1, :, 3:] = there
    slots = (chosen[..., None] * page + np.arange(page)).reshape(2, 2, -1)
    read, parts = np.zeros((2, stored, there * page), bool), []
    for row in range(2):
        for unit in range(2):
            head, own = unit * stored // 2, slots[row, unit, : lengths[row]]
            read[row, head, own] = True
            mask = np.ones((1, 1, len(own)), bool)
            parts.append(softmax_attention(
                q[row : row + 1, :, 2 * unit : 2 * unit + 2], *(x[row : row + 1, head, own][:, :, None] for x in (k, v)), mask, SCALE))
    oracle = tuple(np.concatenate([np.concatenate(own[i : i + 2], axis=2) for i in (0, 2)]) for own in zip(*parts, strict=True))
    keys, values = (
        in_pages(jnp.asarray(np.where(read[..., None], x, np.nan), dtype), page, "exact").of_pages(jnp.asarray(chosen))
        for x in (k, v)
    )
    where = PerHead(jnp.zeros(slots.shape, jnp.int32), None, 2)
    tokens = CachedTokens(keys, values, jnp.asarray(lengths, jnp.int32), where)
    options = dict(scale=SCALE, q_positions=jnp.asarray(lengths[:, None], jnp.int32), causal=False, window=None)
    check(run(coefficient_attention, jnp.asarray(q, dtype), tokens, **options), oracle, dtype)
