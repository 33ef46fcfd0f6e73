"""Parts by name: what the command line, the evaluations and the contract tests find."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lowrank_kv_jax.method.part import Part

REGISTRY: dict[str, type[Part]] = {}


def check_free(table: Mapping[str, type], name: str, cls: type, kind: str) -> None:
    """Raise ValueError where a name is that of another class than an earlier definition of the same one."""
    old = table.get(name, cls)
    if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{kind} name {name!r} is taken by {old.__module__}.{old.__qualname__}")


_Part = TypeVar("_Part", bound=Part)


def register(name: str) -> Callable[[type[_Part]], type[_Part]]:
    """Class decorator: make a part known to the CLI, the evals and the contract tests under `name`.

    Raises:
        ValueError: the name is that of another class. A class defined anew (a notebook's cell, a reload) takes its place.
    """

    def add(cls: type[_Part]) -> type[_Part]:
        check_free(REGISTRY, name, cls, "method")
        cls.name = name
        cls.__post_init__ = _bounded(cls.__post_init__)
        cls.__eq__, cls.__hash__ = _equal, _hash
        REGISTRY[name] = cls
        return cls

    return add


def _bounded(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """A class' own checks after those of its bounds, whether or not it calls those of its bases."""

    @functools.wraps(own)
    def __post_init__(self):
        Part.__post_init__(self)
        own(self)

    return __post_init__


def _value(part: Part) -> tuple[Any, ...]:
    """All that a method is. Types count: rank=1 is one column and rank=1.0 all of them, though 1 == 1.0."""
    values = (getattr(part, field.name) for field in dataclasses.fields(part))
    return type(part), *((type(value), value) for value in values)


def _equal(self: Part, other: object) -> bool:
    return isinstance(other, Part) and _value(self) == _value(other)


def _hash(self: Part) -> int:
    return hash(_value(self))
