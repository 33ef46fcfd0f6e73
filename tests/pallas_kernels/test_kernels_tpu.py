"""The TPU kernels, interpreted on a CPU with race detection, against float64; memory starts as NaN."""

import functools

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from kernel_cases import Case, check, lanes, make, make_owned, slow

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention

ROPE = RopeSpec(10000.0, 64)
SOME = (((8, 3), (4, 4), (2, 5), (1, 11)), ((8, 7), (2, 21)))
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
        Case(runs=SOME, lengths=(0, 1, 129, 300)),
        slow(Case(runs=MANY, J=1, Jv=1, N=24, lengths=(300, 130), S=2500, dtype="bfloat16")),
        Case(bits=8, rank_k=32, rank_v=64, lengths=(0, 1, 127, 129, 300)),
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
        Case(rope=ROPE, S=1100, lengths=(1, 511, 513, 1100), gaps=(0, 600), jumps=(100000, 9)),
        slow(Case(rope=RopeSpec(500000.0, 48), J=1, Jv=1, rank_k=96, per_row=True, N=8, K=4, gaps=(64, 70), lengths=(0, 300))),
        slow(Case(rope=ROPE, mean=True, lengths=(1, 300), J=1, Jv=1)),
        slow(Case(rope=ROPE, runs=MANY, mean=True, J=1, Jv=1, gaps=(0, 130), jumps=(100000, 9), lengths=(0, 300))),
        Case(rope=ROPE, bits=8, lengths=(1, 300), gaps=(0, 130), jumps=(100000, 9)),
        slow(Case(rope=None, per_row=True, rank_k=16, dtype="bfloat16", lengths=(300, 5))),
    ],
    ids=str,
)
def test_rotary(case):
    x = make(case)
    check(run(rotary_coefficient_attention, x.q, lanes(x.tokens), x.basis, **x.options), x.oracle, case.dtype)


def test_heads_of_unequal_budgets():
    """Head after head in one buffer, with two slots that changed hands."""
    x = make_owned(((5, 0, 130),))
    check(run(coefficient_attention, x.q, lanes(x.tokens), **x.options), x.oracle)
