"""JSON that others wrote: one object a file, its fields of the types that are expected."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import refuse_device

DEEPEST = 64
"""Objects and lists within each other. What Python could parse at all, it may fail to compare or to write again."""

_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "an integer", float: "a number", bool: "true or false",
    type(None): "null",
}


def parse_json(text: str | bytes, **options: Any) -> Any:
    """What a text of JSON holds; `options` are those of `json.loads`.

    Raises:
        ValueError: it is no JSON (nor UTF-8), has an integer of thousands of digits, or is nested too deeply.
    """
    try:
        content = json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [content]
    for _ in range(DEEPEST):
        level = [item for value in level for item in _items(value)]
        if not level:
            return content
    raise ValueError(f"nested too deeply, more than {DEEPEST} levels")


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ValueError: it holds something else; OSError: it cannot be read.
    """
    refuse_device(path)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a JSON object is expected, got {_NAMES[type(content)]}")
    return content


def check_fields(
    place: str | os.PathLike, found: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]]
) -> None:
    """Raise ValueError for the first of these fields that is missing or of another type."""
    for name, kinds in fields.items():
        if name not in found:
            raise ValueError(f"{place}: the field {name!r} is missing")
        if not isinstance(found[name], kinds) or (isinstance(found[name], bool) and kinds is int):
            kinds = kinds if isinstance(kinds, tuple) else (kinds,)
            raise ValueError(f"{place}: {name}={short(found[name])}: must be {' or '.join(_NAMES[k] for k in kinds)}")
