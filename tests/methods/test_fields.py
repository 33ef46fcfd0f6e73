"""The documentation of fields."""

import pytest

from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.fields import fields_of, without_fields
from lowrank_kv_jax.summaries.component import Summary


@pytest.mark.parametrize("cls", [*REGISTRY.values(), Summary], ids=lambda cls: cls.name)
def test_every_field_is_described(cls):
    """Its own and inherited ones, by the nearest class that says what they are."""
    assert not [field.name for field in fields_of(cls) if not field.text or not field.kinds]
    assert without_fields(cls) and "Attributes:" not in without_fields(cls)


def test_the_nearest_class_describes_a_field():
    (sinks,) = (field for field in fields_of(REGISTRY["streamingllm"]) if field.name == "sinks")
    assert (sinks.default, sinks.kinds, sinks.text) == ("4", "int", "first tokens that stay.")
    (keep,) = (field for field in fields_of(REGISTRY["sliding-window"]) if field.name == "keep")
    assert keep.default == "none" and keep.kinds == "float or none" and keep.text.endswith("1.0 is everything.")
