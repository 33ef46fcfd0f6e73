"""Every field of every registered method, given what it cannot hold: by a rule, not one by one."""

import dataclasses
import math

import helpers
import pytest
from refusing import refused

from lowrank_kv_jax.checks.bounds import MOST, plain_fields
from lowrank_kv_jax.estimators.estimator import ESTIMATORS
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.summaries.component import Summary

NUMBERS = {int, float}
ALLOWED = ("must ", "allowed are ", "expected ", "give ", "has ", "only ")
"""One of these says what is."""


def bad_values(kinds):
    """What a field of these types refuses, whatever it counts."""
    kinds = set(kinds)
    if kinds & NUMBERS:
        yield from (-1, 10**30, -(10**30), "x", [1])
    if int in kinds:
        yield 10**5000
    if float in kinds:
        yield from (math.nan, math.inf, -math.inf, 1e30, -0.5)
    if kinds & NUMBERS and bool not in kinds:
        yield True
    if str in kinds:
        yield from ("nothing", "", 5)
    if bool in kinds:
        yield from (5, "yes")
    if type(None) not in kinds:
        yield None


METHODS = {name: REGISTRY[name] for name in sorted(REGISTRY)} | {Summary.name: Summary}
TABLE = [(name, field.name) for name, cls in METHODS.items() for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("name, field", TABLE)
def test_a_field_says_what_it_takes(name, field):
    cls = METHODS[name]

    def use(value):
        part = cls(**{field: value})
        getattr(part, "validate", lambda spec: None)(helpers.PLAIN.attention)  # a table of ranks is read there

    for value in bad_values(plain_fields(cls)[field]):
        line = refused(lambda value=value: use(value), f"{field}={shown(value)}")
        assert any(word in line for word in ALLOWED), line


def shown(value):
    return "an integer of thousands of digits" if value == 10**5000 else f"{value!r:.12}"


def test_the_table_is_long():
    assert len(TABLE) > 200 and sum(len(list(bad_values(plain_fields(METHODS[n])[f]))) for n, f in TABLE) > 2000


@pytest.mark.parametrize("name, field", [(name, f.name) for name in sorted(ESTIMATORS) for f in dataclasses.fields(ESTIMATORS[name])])
def test_a_field_of_an_estimator_says_what_it_takes(name, field):
    cls = ESTIMATORS[name]
    for value in bad_values(plain_fields(cls)[field]):
        line = refused(lambda value=value: cls(**{field: value}), f"{field}={shown(value)}")
        assert any(word in line for word in ALLOWED), line


@pytest.mark.parametrize("name", sorted(name for name, cls in ESTIMATORS.items() if "size" in cls.__dataclass_fields__))
@pytest.mark.parametrize("value", (0, -1, MOST + 1, 10**30, 2.5, "x", True, None))
def test_sizes_of_estimators(name, value):
    refused(lambda: ESTIMATORS[name](size=value), f"size={value!r:.12}", "must be")
