"""Bases as Triton kernels read them, interpreted: in factors, and where they lie among those of other layers."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import Case, check, make

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.expanded_values import gpu_triton
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.storage.basis import RowsOf, Scaled, as_array
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.positions import Runs

ROPE = RopeSpec(10000.0, 64)
RUNS = (((8, 3), (4, 4), (2, 5), (1, 35)), ((8, 7), (2, 33)))
PACKED = Case(rope=ROPE, runs=RUNS, lengths=(0, 1, 65, 300), dtype="bfloat16", mean=True)


def attend(x, basis, backend, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(functools.partial(rotary_coefficient_attention, backend=backend, **x.options | options))(
            x.q, x.tokens, basis)


def factors(case, shape, per_row: bool, weighed: bool, seed: int = 0):
    """A basis of directions in 8 bits, whose columns differ by a factor of a hundred as those of codes do."""
    rng, (*_, units, width, rank) = np.random.default_rng(seed), shape
    directions = jnp.asarray(rng.integers(-127, 128, (units, width, rank)), jnp.int8)
    steps = np.sqrt(2.0 ** np.concatenate([np.full(count, bits - 1) for bits, count in case.runs[0]]))
    factors = [jnp.asarray(1 / steps, jnp.float32), jnp.full((units, rank), 1 / 80 / rank**0.5, jnp.bfloat16)]
    if per_row:
        factors.append(jnp.asarray(rng.uniform(0.5, 2, (len(case.lengths), units, rank)), jnp.float32))
    weights = jnp.asarray(rng.uniform(0.5, 2, (units, width)), jnp.float32) if weighed else None
    return Scaled(directions, weights, tuple(factors))


@pytest.mark.parametrize("case, per_row, weighed", [
    pytest.param(PACKED, False, True, marks=pytest.mark.newest),
    (dataclasses.replace(PACKED, J=1, gaps=(0, 64), jumps=(100000, 9)), True, False),
    pytest.param(dataclasses.replace(PACKED, D=96, N=6, rope=RopeSpec(500000.0, 48)), True, True, marks=pytest.mark.slow),
    pytest.param(dataclasses.replace(PACKED, rope=None, per_row=True), False, True, marks=pytest.mark.slow),
], ids=str)
def test_directions_of_codes_stay_in_8_bits(case, per_row, weighed):
    """Means of each row, as they come from prompts, beside a basis that rows share or that their steps make their own."""
    x = make(case)
    basis, rng = factors(case, x.basis.shape, per_row, weighed), np.random.default_rng(3)
    mean = jnp.asarray(rng.normal(size=(len(case.lengths), case.K, case.D)), jnp.bfloat16)
    found = attend(x, basis, "triton", key_mean=mean)
    exact = dataclasses.replace(x, q=x.q.astype(jnp.float32))
    wanted = attend(exact, as_array(basis), "xla", key_mean=mean)
    wide = 4  # values in 8 bits are numbers of some ten
    check(found._replace(out=found.out / wide), (np.asarray(wanted.out) / wide, np.asarray(wanted.lse)), case.dtype)


@pytest.mark.parametrize("rank", [32, pytest.param(320, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_keys_of_a_layer_whose_basis_lies_among_others(rank, layer):
    case = Case(rope=ROPE, J=1, per_row=True, rank_k=rank, lengths=(0, 129, 300), dtype="bfloat16")
    x, others = make(case), np.random.default_rng(1)
    width = x.basis.shape[2]
    layers = [jnp.asarray(others.normal(size=x.basis.shape), jnp.bfloat16) for _ in range(3)]
    layers[layer] = x.basis
    basis = RowsOf(jnp.concatenate(layers, axis=2), layer * width, width)
    found = attend(x, basis, "triton")
    for own, same in zip(found, attend(x, x.basis, "triton"), strict=True):
        np.testing.assert_array_equal(own, same)
    check(found, x.oracle, case.dtype)


def test_values_of_a_layer_whose_basis_lies_among_others():
    rng, rows, heads, dim, rank, slots = np.random.default_rng(0), 2, 2, 32, 48, 20
    whole = jnp.asarray(rng.normal(size=(rows, 1, 3 * heads * dim, rank)), jnp.float32)
    q, out = (jnp.asarray(rng.normal(size=(rows, 1, 2 * heads, width)), jnp.float32) for width in (dim, rank))
    k, v = jnp.asarray(rng.normal(size=(2, rows, heads, slots, dim)), jnp.float32)
    where = Runs(jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1), jnp.int32))
    tokens = CachedTokens(k, v, jnp.asarray([7, slots], jnp.int32), where)
    beside = Beside(q, tokens, jnp.full((rows, 1), slots, jnp.int32), causal=False, window=None)
    part, basis = AttnPartial(out, out.sum(-1)), RowsOf(whole, heads * dim, heads * dim)
    expand = functools.partial(
        gpu_triton.expanded_values, part=part, kv_heads=heads, mean=None, beside=beside, scale=0.1, cap=None, interpret=True)
    for own, same in zip(expand(basis), expand(as_array(basis)), strict=True):
        np.testing.assert_array_equal(own, same)
