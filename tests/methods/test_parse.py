"""Method specs as text."""

import dataclasses

import pytest
from helpers import exact_configuration, small_configuration

from lowrank_kv_jax.method import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method, spell_method


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_method_is_spelled_and_read_back(name):
    cls = REGISTRY[name]
    for method in (exact_configuration(cls), small_configuration(cls)):
        again = parse_method(spell_method(method))
        assert again == method and spell_method(again) == spell_method(method)
    assert type(parse_method(name)) is cls


def test_values_are_read_by_the_type_of_their_field():
    method = parse_method(" ojakv:rank=32,rank_v=0.5,rope=pre,transport=False,steps=2,energy=none ")
    assert (method.rank, method.rank_v, method.rope, method.transport, method.steps) == (
        32,
        0.5,
        "pre",
        False,
        2,
    )
    assert isinstance(method.rank, int) and method.energy is None
    assert isinstance(parse_method("ojakv:rank=1").rank, int) and isinstance(
        parse_method("ojakv:rank=1.0").rank, float
    )
    assert spell_method(parse_method("ojakv:rank=1.0")) == "ojakv:rank=1.0"


def test_one_column_and_full_rank_are_different_methods():
    """1 == 1.0 in Python, but not here: programs and caches are looked up by the method's value."""
    column, everything = parse_method("ojakv:rank=1"), parse_method("ojakv:rank=1.0")
    assert column != everything
    assert {column: "column", everything: "everything"}[parse_method("ojakv:rank=1")] == "column"


@pytest.mark.parametrize(
    "text, message",
    [
        ("ojakvv", "unknown method 'ojakvv', did you mean 'ojakv'"),
        ("", "unknown method ''"),
        ("ojakv:rnk=3", "has no field 'rnk', did you mean 'rank'"),
        ("ojakv:rank", "'rank' is not of the form field=value"),
        ("ojakv:rank=1,rank=2", "field 'rank' is given twice"),
        ("ojakv:rank=half", "rank='half' is not int or float or None"),
        ("ojakv:rank=", "rank='' is not"),
        ("ojakv:transport=maybe", "transport='maybe' is not bool"),
        ("ojakv:steps=1.5", "steps='1.5' is not int"),
        ("ojakv:steps=none", "steps='none' is not int"),
        ("ojakv:rank=0", "rank=0"),
        ("ojakv:rank=nan", "rank=nan"),
        ("ojakv:rope=mid", "rope='mid': allowed are pre, post"),
        ("ojakv:eta_dec=inf", "eta_dec=inf"),
        ("ojakv:normalize=l2", "normalize='l2'"),
        ("ojakv:top=0", "top=0.0"),
        ("single-svd:energy=0.9", "energy=0.9: only methods with calibrated bases"),
        ("static-pca:sinks=-1", "sinks=-1"),
        ("eigenattention:heads=joint", "heads='joint'"),
        ("streamingllm:sinks=0", "sinks=0"),
        ("streamingllm:positions=none", "positions='none'"),
        ("streamingllm:budget=4", "budget=4: must exceed the 4 sinks"),
        ("sliding-window:keep=1.5", "keep=1.5"),
        ("sliding-window:keep=0.5,budget=8", "give one of them"),
    ],
)
def test_errors_name_what_is_wrong_and_what_is_allowed(text, message):
    with pytest.raises(ValueError) as error:
        parse_method(text)
    assert message in str(error.value)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_methods_are_frozen_and_hashable_by_value(name):
    method = exact_configuration(REGISTRY[name])
    assert hash(method) == hash(dataclasses.replace(method)) and method == dataclasses.replace(method)
    for field in dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)
