"""Nothing that a cache keeps comes of a product that accelerators round: float32 by float32 is asked for as such."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import PLAIN, bases_for, model, prompts

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import parse_method

SPECS = [
    "ojakv:sinks=4,recent=8,bits=3", "streamingkv:sinks=4,recent=8", "osp:sinks=4,recent=8,chunk_length=32",
    "xkv:sinks=4,recent=8,group=3,recompress=16", "single-svd:sinks=4,recent=8,bits=3",
    "momentkv:budget=24,recent=8",
    "static-pca:rank=0.5+snapkv:budget=24,recent=8+moments",
]
SLOW = [
    "transform:sinks=4,recent=8,steps=prompt",
    "ojakv:sinks=4,recent=8", "streamingkv:sinks=4,recent=8,bits=3", "xkv:sinks=4,recent=8,group=3,bits=3",
    "palu:sinks=4,recent=8,bits=3", "transform:sinks=4,recent=8", "static-pca:sinks=4,recent=8,rank=0.5", "kivi:bits=2",
    "shadowkv:sinks=4,recent=8",
]
READING = ("attention/", "pallas_kernels/", "method/votes.py", "selections/reread.py", "summaries/residuals.py")
"""Files whose products are attention, votes or scores: read, and not kept."""


@pytest.mark.parametrize("spec", [*SPECS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW)])
def test_what_is_kept_is_multiplied_in_float32(spec):
    method, attention = parse_method(spec), PLAIN.attention
    machine, bases = machine_of(method), bases_for(method, PLAIN)
    with jax.default_matmul_precision(None):  # as users have it
        cache = jax.eval_shape(lambda: prefill(
            method, PLAIN, model().params, prompts(2, 96), bases=bases, capacity=160, block=16, dtype=jnp.float32)[0])
        own, first = bases_of_group(method, attention, bases)[0], machine.layer_groups(attention)[0]
        layout, state, integers = cache.layout.of_group(first), cache.groups[0], functools.partial(shape, dtype=jnp.int32)
        queries, keys = (shape(2, 32, heads, attention.head_dim) for heads in (attention.q_heads, attention.kv_heads))
        taps, counts, positions = (Taps(queries, keys, keys, keys),) * len(first), integers(2), integers(2, 32)

        def compress(taps, lengths):
            return machine.compress(layout, own, machine.init(layout, own), taps, lengths)

        def read_on(state, taps, counts, positions):
            seen = (None,) * len(taps)
            return machine.ingest(layout, own, state, taps, seen, positions, counts, of_prompt=False)

        found = collections.Counter()
        rounded(jax.make_jaxpr(compress)(taps, counts).jaxpr, found)
        rounded(jax.make_jaxpr(lambda state: machine.refresh(layout, own, state))(state).jaxpr, found)
        if not machine.votes:
            rounded(jax.make_jaxpr(read_on)(state, taps, counts, positions).jaxpr, found)
    assert not found


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def rounded(jaxpr, found):
    """Counts products of float32 without a precision by where they stand, those that are only read left out."""
    for equation in jaxpr.eqns:
        wide = equation.primitive.name == "dot_general" and all(x.aval.dtype == jnp.float32 for x in equation.invars)
        if wide and equation.params["precision"] is None:
            frames = (f"{x.file_name}:{x.line_num}" for x in equation.source_info.traceback.frames)
            where = next(x.partition("/lowrank_kv_jax/")[2] for x in frames if "/lowrank_kv_jax/" in x)
            if not where.startswith(READING):
                found[where] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    rounded(inner, found)
