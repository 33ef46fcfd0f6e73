"""Methods as text that `parse_method` reads."""

import dataclasses

from lowrank_kv_jax.method.machine import Machine
from lowrank_kv_jax.method.part import Part


def spell_method(method: Part) -> str:
    """A spec that parses to `method`."""
    if isinstance(method, Machine):
        return "+".join(spell_method(part) for part in method.parts)
    given = []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if value != field.default or type(value) is not type(field.default):
            given.append(f"{field.name}={str(value).lower() if value is None or isinstance(value, bool) else value}")
    return method.name + (":" + ",".join(given) if given else "")
