"""Method specs as text: `name`, `name:field=value,field=value`, and compositions of these with `+`."""

import dataclasses
import difflib
import types
import typing
from typing import Any

from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.part import check_one_of
from lowrank_kv_jax.method.spell import spell_method as spell_method
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.compose import compose
from lowrank_kv_jax.summaries.component import SUMMARIES

BUDGETS = ("budget", "budget_bytes", "keep")  # fields of which one counts: giving it unsets the defaults of the others


def parse_method(text: str) -> Part:
    """A method from its spec, e.g. `ojakv:rank=0.5,rope=pre`.

    Values are read by the type of the field: `rank=32` counts columns, `rank=0.5` is a fraction, `none` is None. A word
    without `=` is a preset of the method (`ojakv:paper,rank=0.6`); fields given beside it win. `+` joins the stages of a
    composition in any order: `ojakv:rank=0.6+snapkv:keep=0.5`, `h2o:budget=256+moments`.

    Raises:
        ValueError: unknown name or field (with the nearest known one), a value of the wrong type, or one that the
            method itself refuses; stages that do not go together, or the same stage twice.
    """
    if not isinstance(text, str):
        raise TypeError(f"method={text!r}: must be text such as 'ojakv:rank=0.5'")
    parts = [_parse_part(part) for part in text.split("+")]
    if len(parts) == 1 and isinstance(parts[0], Part):
        return parts[0]
    stages: dict[str, Any] = {}
    for part in parts:
        if part.stage is None:
            raise ValueError(f"{text!r}: {part.name} stands alone, it is no stage of a composition")
        if part.stage in stages:
            raise ValueError(f"{text!r}: {stages[part.stage].name} and {part.name} are both a {part.stage}; "
                             "a composition takes one of each stage")
        stages[part.stage] = part
    return compose(**stages)


def as_method(method: Part | str) -> Part:
    """The method itself, or the one that a spec spells.

    Raises:
        ValueError: as `parse_method`.
        TypeError: neither a method nor text.
    """
    if isinstance(method, str):
        return parse_method(method)
    if not isinstance(method, Part):
        raise TypeError(f"method={method!r}: must be a method, or its spec such as 'ojakv:rank=0.5'")
    return method


def _parse_part(text: str) -> Any:
    """One method or summary."""
    name, _, rest = text.strip().partition(":")
    if name in SUMMARIES:
        return _configure(SUMMARIES[name], name, rest, text)
    if name not in REGISTRY:
        raise ValueError(f"unknown method {name!r}{_nearest(name, REGISTRY)}; known: {', '.join(sorted(REGISTRY))}")
    return _configure(REGISTRY[name], name, rest, text)


def _configure(cls: Any, name: str, rest: str, text: str) -> Any:
    presets = getattr(cls, "presets", {})
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    preset: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        field, equals, value = item.partition("=")
        field = field.strip()
        if not equals:
            if field not in presets:
                known = f"; presets of {name}: {', '.join(presets)}" if presets else ""
                raise ValueError(f"{text!r}: {item!r} is not of the form field=value{known}")
            preset |= presets[field]
            continue
        if field not in fields:
            raise ValueError(f"{name} has no field {field!r}{_nearest(field, fields)}; it has: {', '.join(fields)}")
        if field in values:
            raise ValueError(f"{text!r}: field {field!r} is given twice")
        values[field] = _read(name, field, value.strip(), fields[field])
    if any(field in values for field in BUDGETS):
        preset |= {field: None for field in BUDGETS if field in fields}
    one_of = getattr(cls, "one_of", ())
    # of fields that equal their defaults, too
    check_one_of(one_of, {field: value for field, value in values.items() if value is not None})
    if any(values.keys() & set(own) for own in one_of):  # what is given takes the place of what a preset says
        others = {field for own in one_of if not values.keys() & set(own) for field in own}
        preset = {field: value for field, value in preset.items() if field not in others}
    return cls(**{**preset, **values})


def _nearest(word: str, known) -> str:
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else ""


def _read(name: str, field: str, value: str, hint: Any) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    lowered = value.lower()
    if type(None) in options and lowered == "none":
        return None
    if bool in options and lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        if kind in options:
            try:
                return kind(value)
            except ValueError:
                continue
    if str in options:
        return value
    allowed = " or ".join("None" if o is type(None) else o.__name__ for o in options)
    raise ValueError(f"{name}: {field}={value!r} is not {allowed}")
