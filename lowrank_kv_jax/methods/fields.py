"""The fields of a part, its own and inherited ones, with what their documentation says."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a part.

    Attributes:
        name: its name.
        default: its value where a spec does not give it, as a spec spells it.
        kinds: the types that it takes, e.g. "int, float or none".
        text: what it is and what is allowed, from the docstring of the nearest class that describes it; "" if none does.
    """

    name: str
    default: str
    kinds: str
    text: str


def fields_of(cls: type) -> tuple[Field, ...]:
    """The fields of a part or summary in their order, inherited ones too."""
    hints = typing.get_type_hints(cls)
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= dict(_entries(base.__dict__.get("__doc__") or ""))
    return tuple(Field(f.name, spelled(f.default), _kinds(hints[f.name]), texts.get(f.name, ""))
                 for f in dataclasses.fields(cls))


def without_fields(cls: type) -> str:
    """The documentation of a class but for its section of attributes."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:")[0].rstrip()


def spelled(value: Any) -> str:
    """A value as a spec spells it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _entries(doc: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the attributes of a docstring in Google's form; names that share an entry share its text."""
    names: list[str] = []
    words: list[str] = []
    section = inspect.cleandoc(doc).partition("\nAttributes:\n")[2]
    for line in [*section.splitlines(), ""]:
        entry = _ENTRY.match(line)
        if entry or not line.startswith("        "):
            yield from ((name, " ".join(words)) for name in names)
            names, words = [], []
        if entry:
            names, words = entry[1].split(", "), [entry[2]]
        elif not line.startswith("    "):
            break
        elif names:
            words.append(line.strip())


def _kinds(hint: Any) -> str:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    names = ["none" if option is type(None) else option.__name__ for option in options]
    return ", ".join(names[:-1]) + (" or " if names[:-1] else "") + names[-1]
