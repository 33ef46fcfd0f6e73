"""Packed codes as a CPU holds them: the same bytes, the other way round."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, PROMPT, bases_for, model, prompts
from kernel_cases import Case, check, make, slow

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.method.cache import fork, insert_rows, take_rows, with_token_layout
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.segments import coded
from lowrank_kv_jax.storage.held import hold, like_before
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import map_tokens
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.storage.tokens_last import TokensLast, tokens_last_of
from lowrank_kv_jax.storage.water_filled import empty_water_filled

RUNS = ((8, 3), (4, 5), (2, 5), (1, 11))
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other platforms hold arrays")


def test_what_is_written_to_either_is_read_from_both():
    x = np.random.default_rng(0).normal(size=(2, 3, 96, 24)).astype(np.float32) * 20
    gaps = jnp.zeros((2, 2), jnp.int32)
    empty = coded.without_tokens(*(empty_water_filled(2, 3, 96, RUNS) for _ in "kv"))
    rows = jax.jit(coded.hold)(empty, x[:, :, :50], x[:, :, 9:59], jnp.array([50, 20]), Runs(gaps, gaps))
    held = hold(rows, None)
    assert isinstance(held.k.codes, TokensLast) and held.k.codes.columns.shape == (2, 3, 3 + 3 + 2 + 2, 96)
    assert held.k.codes.shape == rows.k.codes.shape and held.k.codes.nbytes == rows.k.codes.nbytes

    @jax.jit
    def change(segment):
        segment = coded.append(segment, jnp.asarray(x[:, :, 50:59]), jnp.asarray(x[:, :, :9]), jnp.array([9, 4]))
        return dataclasses.replace(segment, v=map_tokens(segment.v, segment.length, lambda z: -z, jnp.array([True, False])))

    read = jax.jit(lambda side: (side.read_block(30, 40), side.read_parts(8, 20)))
    rows, held = change(rows), change(held)
    for side in "kv":
        one, other = getattr(rows, side), getattr(held, side)
        np.testing.assert_array_equal(one.codes, np.asarray(other.codes))
        (block, parts), (other_block, other_parts) = read(one), read(other)
        np.testing.assert_array_equal(block, other_block)
        for part, turned in zip(parts, other_parts, strict=True):
            np.testing.assert_array_equal(part, np.swapaxes(turned, 2, 3))
    assert isinstance(like_before(held, rows).k.codes, TokensLast)  # also what a method gave back as an array


def test_an_append_writes_in_place():
    held = hold(coded.without_tokens(*(empty_water_filled(2, 3, 1 << 14, RUNS) for _ in "kv")), None)
    new = [jnp.zeros((2, 3, 1, 24)) for _ in "kv"]
    memory = jax.jit(coded.append, donate_argnums=0).lower(held, *new, jnp.ones(2, jnp.int32)).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(held))
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size / 100


def columns(tokens):
    """The same tokens as a CPU holds them."""
    turn = functools.partial(jax.tree.map, tokens_last_of)
    return tokens._replace(keys=turn(tokens.keys), values=turn(tokens.values))


S = 2311
RUNS_K, RUNS_V = ((8, 9), (4, 21), (2, 13), (1, 40)), ((4, 32), (1, 24))


@pytest.mark.parametrize("case", [
    Case(S=S, J=1, Jv=1, N=9, K=3, runs=(RUNS_K, RUNS_V), lengths=(S,)),
    slow(Case(S=S, J=2, Jv=1, runs=(RUNS_K, RUNS_V), lengths=(0, 700, S), T=3, causal=True)),
    Case(S=S, J=1, Jv=1, runs=(RUNS_K, RUNS_V), lengths=(S,), rope=RopeSpec(10000.0, 64)),
    slow(Case(S=S, J=2, Jv=2, runs=(RUNS_K, RUNS_V), lengths=(1301, S), rope=RopeSpec(10000.0, 64), per_row=True)),
], ids=str)
def test_attention_unpacks_a_block_at_a_time(case):
    """Against float64; and in the optimised program no array of floats has as many tokens as the buffer."""
    x = make(case)
    op = functools.partial(coefficient_attention, **x.options, backend="xla")
    if case.rope is not None:
        op = functools.partial(rotary_coefficient_attention, key_basis=x.basis, value_basis=None, **x.options, backend="xla")
    tokens = columns(x.tokens)
    program = jax.jit(op).lower(x.q, tokens).compile()
    check(program(x.q, tokens), x.oracle)
    floats = re.findall(r"\b(?:f64|f32|f16|bf16)\[([\d,]+)\]", program.as_text())
    assert floats and not [shape for shape in floats if str(S) in shape.split(",")]
    rows = jax.jit(op).lower(x.q, x.tokens).compile()
    assert program.memory_analysis().temp_size_in_bytes <= rows.memory_analysis().temp_size_in_bytes * 1.1


def test_rows_of_a_batch_are_forked_taken_inserted_and_laid_out():
    method = parse_method("transform:bits=3,rope=post,metric=attention,sampled=False")
    bases = bases_for(method, PLAIN)
    cache, _ = prefill(method, PLAIN, model().params, prompts(length=PROMPT), capacity=CAPACITY, bases=bases)
    held = [x for _, x, _ in walk(cache) if isinstance(x, TokensLast)]
    assert len(held) == 2 * len(cache.groups)
    both = insert_rows(take_rows(cache, [1]), take_rows(fork(cache, 2), [0]))
    found = [x for _, x, _ in walk(both) if isinstance(x, TokensLast)]
    for one, other in zip(held, found, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[::-1], np.asarray(other))
    back = with_token_layout(with_token_layout(cache, "lanes"), "rows")
    chex.assert_trees_all_equal_structs(back, cache)
    chex.assert_trees_all_equal(back, cache)
