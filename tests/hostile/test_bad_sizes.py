"""Fields at the most that they take, in a small cache: refused, or no more than small."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import pytest
from mutants import in_time
from refusing import refused

from lowrank_kv_jax.checks.bounds import MOST, plain_fields
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.oversized import FIELDS
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache

SPEC = helpers.PLAIN.attention
LAYOUT = Layout(SPEC, 1, 96, 160, 16, "float32")
INTEGERS = [(name, field.name) for name in sorted(REGISTRY) for field in dataclasses.fields(REGISTRY[name])
            if int in plain_fields(REGISTRY[name])[field.name]]
OF_LAYERS = (("xkv", "group"), ("transform", "group"))


def with_field(name, field, value):
    """A method of small sizes but for one; a share of the tokens in the place of a number that the ends would exceed."""
    small = helpers.small_configuration(REGISTRY[name])
    if {"budget", "keep"} <= set(plain_fields(REGISTRY[name])) and small.budget is not None:
        small = dataclasses.replace(small, budget=None, keep=0.5)
    return dataclasses.replace(small, **{field: value})


@pytest.mark.parametrize("name, field", [row for row in INTEGERS if row[1] in FIELDS and row not in OF_LAYERS])
def test_a_field_that_counts_tokens(name, field):
    method = with_field(name, field, MOST)
    bases = helpers.bases_for(with_field(name, field, 4)) if method.calibrated else None
    refused(lambda: abstract_cache(method, LAYOUT, bases), f"{field}={MOST}: must be at most 65536 in a cache of 160 tokens")


@pytest.mark.parametrize("spec, words", (
    ("kivi:bits=4+quest:page=100000", "page=100000: must be at most 65536"),
    ("kivi:sinks=100000+snapkv:keep=0.5", "sinks=100000: must be at most 65536"),
    ("kivi+h2o:keep=0.5,recent=100000", "recent=100000: must be at most 65536"),
))
def test_parts_of_compositions(spec, words):
    refused(lambda: abstract_cache(parse_method(spec), LAYOUT), words)


@pytest.mark.slow
@pytest.mark.parametrize("name, field", INTEGERS)
def test_no_field_overflows_or_asks_for_more_than_there_is(name, field):
    """What a prefill would hold, foretold, with the field at its most."""
    tokens, params = jax.ShapeDtypeStruct((1, 96), jnp.int32), helpers.model().params
    with in_time():
        try:
            method = with_field(name, field, MOST)
            method.validate(SPEC)
            bases = helpers.bases_for(method) if method.calibrated else None
            cache, _ = jax.eval_shape(lambda p, x: prefill(method, helpers.PLAIN, p, x, bases=bases, capacity=160), params, tokens)
        except ValueError as error:
            assert f"{field}={MOST}" in str(error)
        else:
            assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) < 1e8
