"""Calibrated bases on disk, with all that decides whether a model and a method may use them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lowrank_kv_jax import __version__
from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.checks.json_objects import check_fields, parse_json
from lowrank_kv_jax.checks.models import check_model
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.group import GroupBases
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import as_method, spell_method
from lowrank_kv_jax.saving.checkpoint import FLOATS, METADATA, check_replaceable, load_arrays, load_metadata, save_arrays

KIND = "bases"

_FIELDS = {"model": str, "fingerprint": str, "method": str, "fit": dict, "groups": list}


def save_bases(
    path: str | Path, bases: tuple[Any, ...], model: Any, method: Part | str, *, corpus: Corpus | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Save calibrated bases to the directory `path`; nothing half-written is ever left there.

    Args:
        bases: of `calibrate`, one entry for each layer group.
        model: the `LoadedModel` they belong to.
        method: the method they were fitted for, or its spec.
        corpus: what they were fitted to; its name and hash are kept.
        settings: anything else to keep beside them, as JSON holds it (window length, seed).

    Raises:
        ValueError: the method has no bases on this model, or these are not of its kind and sizes.
        FileExistsError: `path` exists and holds something else.
    """
    check_model(model, "config", "name", "fingerprint")
    if corpus is not None and not isinstance(corpus, Corpus):
        raise ValueError(f"corpus={short(corpus)}: must be a Corpus, such as `load_corpus` returns, or None")
    settings = _as_json(settings)
    method = as_method(method)
    groups = len(method.layer_groups(model.config.attention))
    if method.bases_type is None or not any(group is not None for group in bases):
        raise ValueError(f"method {method.name!r} has no calibrated bases: there is nothing to save")
    kind = method.bases_type
    if len(bases) != groups or not all(group is None or isinstance(group, kind) for group in bases):
        raise ValueError(f"bases: expected {groups} groups of {kind.__name__}, as calibrate returns them")
    bases_of_group(method, model.config.attention, bases)
    arrays = {f"{i}.{name}": array for i, group in enumerate(bases) for name, array in _fields(group).items()}
    kinds = _kinds(method)
    for name, array in arrays.items():
        if array.dtype.name not in _dtypes(*_place(kinds, name.partition(".")[2])):
            raise ValueError(f"bases: {name} is {array.dtype.name}: must be one of {', '.join(FLOATS)}")
    metadata = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "method": spell_method(method),
        "fit": method.fit_key(model.config.attention),
        "corpus": None if corpus is None else {"name": corpus.name, "sha256": corpus.sha256},
        "settings": settings,
        "library": __version__,
        "groups": [None if group is None else _shapes(group) for group in bases],
    }
    save_arrays(path, KIND, arrays, metadata)


def _as_json(settings: Any) -> dict[str, Any]:
    """Settings as they will be read; NumPy's numbers are as good as Python's."""
    try:
        return parse_json(json.dumps(dict(settings or {}), default=lambda x: x.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"settings={short(settings)}: must be an object that JSON can hold ({error})") from error


def check_bases_replaceable(path: str | Path) -> None:
    """Raise FileExistsError now, not after minutes of calibration, if `save_bases` would refuse `path`."""
    check_replaceable(path, KIND)


def load_bases(path: str | Path, model: Any, method: Part | str) -> tuple[Any, ...]:
    """Load bases that were calibrated for this model and for a method that fits the same ones.

    Fields that `fit` does not depend on may differ: the bases of a static method serve an adaptive one of the
    same ranks (see `Part.fit_key`).

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: they are of another model or other weights, were fitted with other fields (each is named),
            or are damaged.
    """
    method, metadata = as_method(method), describe_bases(path)
    check_model(model, "config", "name", "fingerprint")
    if metadata["fingerprint"] != model.fingerprint:
        raise ValueError(f"{path}: these bases belong to model {metadata['model']!r} with the weights "
                         f"{metadata['fingerprint'][:12]}, not to {model.name!r} ({model.fingerprint[:12]})")
    wanted, saved = method.fit_key(model.config.attention), metadata["fit"]
    differ = [f"{name}={saved.get(name)!r}, this method asks for {wanted.get(name)!r}"
              for name in sorted(set(wanted) | set(saved)) if wanted.get(name) != saved.get(name)]
    if differ:
        raise ValueError(f"{path}: these bases were calibrated for {metadata['method']!r} and do not serve "
                         f"{spell_method(method)!r}: they have {'; '.join(differ)}")
    return _rebuild(path, method, metadata, [len(group) for group in method.layer_groups(model.config.attention)])


def describe_bases(path: str | Path) -> dict[str, Any]:
    """What was saved beside the bases: model, fingerprint, method, fit, corpus, settings, versions.

    Raises:
        FileNotFoundError, ValueError: as `load_bases` where nothing was saved, or it is damaged.
    """
    metadata = load_metadata(path, KIND)
    check_fields(behind_links(path) / METADATA, metadata, _FIELDS)
    return metadata


def _rebuild(path: str | Path, method: Part, metadata: Mapping[str, Any], sizes: list[int]) -> tuple[Any, ...]:
    kinds, file, groups = _kinds(method), behind_links(path) / METADATA, metadata["groups"]
    if len(groups) != len(sizes):
        raise ValueError(f"{file}: groups has {len(groups)} entries: must be {len(sizes)}, one for each layer group")
    like = {
        f"{i}.{name}": _abstract(f"{file}: groups[{i}].{name}", *_place(kinds, name), entry)
        for i, group in enumerate(groups) for name, entry in _entries(f"{file}: groups[{i}]", group).items()
    }
    arrays = load_arrays(path, metadata, like)

    def build(i: int, group: dict[str, Any]) -> Any:
        found = {name: arrays[f"{i}.{name}"] for name in group}
        if "" in kinds:
            return _one_of(kinds[""], found, f"{file}: groups[{i}]")
        shares = tuple(_one_of(kinds["selection."], _under(f"selection.{layer}.", found), f"{file}: groups[{i}]")
                       for layer in range(sizes[i]))
        return GroupBases(_one_of(kinds["codec."], _under("codec.", found), f"{file}: groups[{i}]"), shares, True)

    return tuple(None if group is None else build(i, group) for i, group in enumerate(groups))


def _one_of(kind: Any, found: dict[str, jax.Array], place: str) -> Any:
    """Bases of one part, of its arrays."""
    if hasattr(kind, "restored"):
        return kind.restored(found)
    if dataclasses.is_dataclass(kind):
        if any(array.shape for array in found.values()):
            raise ValueError(f"{place}: must hold numbers, of shape []")
        return kind(**{name: array.item() for name, array in found.items()})
    return kind(**dict.fromkeys(kind._fields) | found)


def _under(prefix: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): x for name, x in found.items() if name.startswith(prefix)}


def _kinds(method: Part) -> dict[str, Any]:
    """Types of the bases by what the names of their arrays begin with: whose they are where both have some."""
    if method.bases_type is not GroupBases:
        return {"": method.bases_type}
    machine = machine_of(method)
    assert machine.selection is not None
    return {"codec.": machine.codec.bases_type, "selection.": machine.selection.bases_type}


def _place(kinds: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """The type that an array belongs to, and its name there."""
    prefix = next((prefix for prefix in kinds if name.startswith(prefix)), "")
    own = name.removeprefix(prefix)
    return kinds.get(prefix), own.partition(".")[2] if prefix == "selection." else own


def _entries(place: str, group: Any) -> dict[str, Any]:
    if group is not None and not isinstance(group, dict):
        raise ValueError(f"{place}={short(group)}: must be an object or null")
    return group or {}


def _dtypes(kind: Any, name: str) -> tuple[str, ...]:
    """What an array of bases of that type may be; some declare which of theirs may be quantised."""
    return (*FLOATS, "int8") if name in getattr(kind, "quantised", ()) else FLOATS


def _abstract(place: str, kind: Any, name: str, entry: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a saved array of that name in its type of bases."""
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else getattr(kind, "_fields", ())
    dtypes = _dtypes(kind, name)
    if name not in names:
        raise ValueError(f"{place}: the bases of this method have no such array")
    if not isinstance(entry, dict):
        raise ValueError(f"{place}={short(entry)}: must be an object with shape and dtype")
    check_fields(place, entry, {"shape": list, "dtype": str})
    if not all(type(size) is int and 0 <= size < 2**31 for size in entry["shape"]):
        raise ValueError(f"{place}.shape={short(entry['shape'])}: must be a list of sizes from 0 to 2**31 - 1")
    if entry["dtype"] not in dtypes:
        raise ValueError(f"{place}.dtype={short(entry['dtype'])}: must be one of {', '.join(dtypes)}")
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), jax.numpy.dtype(entry["dtype"]))


def _fields(group: Any) -> dict[str, jax.Array]:
    """Arrays by name; a number that belongs to the tree structure is an array on disk."""
    if group is None:
        return {}
    if isinstance(group, GroupBases):
        layers = {f"selection.{i}.{name}": x for i, own in enumerate(group.selection) for name, x in _fields(own).items()}
        return {f"codec.{name}": x for name, x in _fields(group.codec).items()} | layers
    if hasattr(group, "saved"):
        return group.saved()
    if dataclasses.is_dataclass(group):
        return {f.name: jax.numpy.asarray(getattr(group, f.name)) for f in dataclasses.fields(group)}
    return {name: x for name, x in group._asdict().items() if x is not None}


def _shapes(group: Any) -> dict[str, Any]:
    return {name: {"shape": list(x.shape), "dtype": x.dtype.name} for name, x in _fields(group).items()}
