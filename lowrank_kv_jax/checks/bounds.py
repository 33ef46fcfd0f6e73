"""What a field or an argument may hold: no slip of the keys overflows, runs for ever or fails somewhere else."""

import functools
import math
import types
import typing
from numbers import Integral, Real
from typing import Any

from lowrank_kv_jax.checks.shown import short

MOST = 2**28
"""Of tokens, channels and the like: sums of several stay within 32 bits."""

_NAMES = {int: "an int", float: "a number", bool: "True or False", str: "a text", types.NoneType: "None"}


def check_int(name: str, value: Any, least: int = 0, most: int = MOST) -> None:
    """Raise ValueError, naming field, value and what is allowed, unless the value is an int from `least` to `most`."""
    if not _is(value, int):
        raise ValueError(f"{name}={short(value)}: must be an int of at least {least}")
    check_number(name, value, least, most)


def check_number(name: str, value: Any, least: float = -MOST, most: float = MOST, sign: str = "=") -> None:
    """Raise ValueError unless a number is finite and lies in `least` to `most`.

    Args:
        sign: between name and value, as the caller wrote them.
    """
    if not _is(value, int) and not math.isfinite(value):
        raise ValueError(f"{name}{sign}{value}: must be a finite number")
    if value < least:
        raise ValueError(f"{name}{sign}{short(value)}: must be at least {least}")
    if value > most:
        raise ValueError(f"{name}{sign}{short(value)}: must be at most {most}")


def check_kind(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raise ValueError unless a value is of one of these plain types."""
    if not any(_is(value, kind) for kind in kinds):
        allowed = " or ".join(_NAMES[kind] for kind in sorted(kinds, key=list(_NAMES).index))
        raise ValueError(f"{name}={short(value)}: must be {allowed}")


@functools.cache
def plain_fields(cls: type) -> dict[str, tuple[type, ...]]:
    """Of the fields that are declared to hold plain values only, the types that they may be of."""
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):  # names that only a type checker sees: nothing is known of any field
        return {}
    found = {}
    for name, hint in hints.items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if all(kind in _NAMES for kind in kinds):
            found[name] = kinds
    return found


def is_number(value: Any) -> bool:
    """Whether a value counts or measures; True does neither."""
    return _is(value, float)


def is_int(value: Any) -> bool:
    """Whether a value counts; True does not."""
    return _is(value, int)


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float):  # NumPy's numbers are as good; to Python alone True is an int
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)
