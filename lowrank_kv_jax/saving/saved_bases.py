"""Calibrated bases on disk, with all that decides whether a model and a method may use them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lowrank_kv_jax import __version__
from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.checks.json_objects import check_fields
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.saving.checkpoint import FLOATS, METADATA, check_replaceable, load_arrays, load_metadata, save_arrays

KIND = "bases"

_FIELDS = {"model": str, "fingerprint": str, "method": str, "fit": dict, "groups": list}


def save_bases(
    path: str | Path, bases: tuple[Any, ...], model: Any, method: Part, corpus: Corpus | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Save calibrated bases to the directory `path`; nothing half-written is ever left there.

    Args:
        bases: of `calibrate`, one entry for each layer group.
        model: the `LoadedModel` they belong to.
        method: the method they were fitted for.
        corpus: what they were fitted to; its name and hash are kept.
        settings: anything else to keep beside them, as JSON holds it (window length, seed).

    Raises:
        ValueError: the method has no bases on this model, or these are not of its kind.
        FileExistsError: `path` exists and holds something else.
    """
    groups = len(method.layer_groups(model.config.attention))
    if method.bases_type is None or not any(group is not None for group in bases):
        raise ValueError(f"method {method.name!r} has no calibrated bases: there is nothing to save")
    kind = method.bases_type
    if len(bases) != groups or not all(group is None or isinstance(group, kind) for group in bases):
        raise ValueError(f"bases: expected {groups} groups of {kind.__name__}, as calibrate returns them")
    arrays = {f"{i}.{name}": array for i, group in enumerate(bases) for name, array in _fields(group).items()}
    for name, array in arrays.items():
        if array.dtype.name not in _dtypes(kind, name.partition(".")[2]):
            raise ValueError(f"bases: {name} is {array.dtype.name}: must be one of {', '.join(FLOATS)}")
    metadata = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "method": spell_method(method),
        "fit": method.fit_key(model.config.attention),
        "corpus": None if corpus is None else {"name": corpus.name, "sha256": corpus.sha256},
        "settings": dict(settings or {}),
        "library": __version__,
        "groups": [None if group is None else _shapes(group) for group in bases],
    }
    save_arrays(path, KIND, arrays, metadata)


def check_bases_replaceable(path: str | Path) -> None:
    """Raise FileExistsError now, not after minutes of calibration, if `save_bases` would refuse `path`."""
    check_replaceable(path, KIND)


def load_bases(path: str | Path, model: Any, method: Part) -> tuple[Any, ...]:
    """Load bases that were calibrated for this model and for a method that fits the same ones.

    Fields that `fit` does not depend on may differ: the bases of a static method serve an adaptive one of the
    same ranks (see `Part.fit_key`).

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: they are of another model or other weights, were fitted with other fields (each is named),
            or are damaged.
    """
    metadata = describe_bases(path)
    if metadata["fingerprint"] != model.fingerprint:
        raise ValueError(f"{path}: these bases belong to model {metadata['model']!r} with the weights "
                         f"{metadata['fingerprint'][:12]}, not to {model.name!r} ({model.fingerprint[:12]})")
    wanted, saved = method.fit_key(model.config.attention), metadata["fit"]
    differ = [f"{name}={saved.get(name)!r}, this method asks for {wanted.get(name)!r}"
              for name in sorted(set(wanted) | set(saved)) if wanted.get(name) != saved.get(name)]
    if differ:
        raise ValueError(f"{path}: these bases were calibrated for {metadata['method']!r} and do not serve "
                         f"{spell_method(method)!r}: they have {'; '.join(differ)}")
    return _rebuild(path, method, metadata, len(method.layer_groups(model.config.attention)))


def describe_bases(path: str | Path) -> dict[str, Any]:
    """What was saved beside the bases: model, fingerprint, method, fit, corpus, settings, versions.

    Raises:
        FileNotFoundError, ValueError: as `load_bases` where nothing was saved, or it is damaged.
    """
    metadata = load_metadata(path, KIND)
    check_fields(behind_links(path) / METADATA, metadata, _FIELDS)
    return metadata


def _rebuild(path: str | Path, method: Part, metadata: Mapping[str, Any], count: int) -> tuple[Any, ...]:
    kind: Any = method.bases_type
    file, groups = behind_links(path) / METADATA, metadata["groups"]
    if len(groups) != count:
        raise ValueError(f"{file}: groups has {len(groups)} entries: must be {count}, one for each layer group")
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(kind._fields)
    like = {
        f"{i}.{name}": _abstract(f"{file}: groups[{i}].{name}", name in names, _dtypes(kind, name), entry)
        for i, group in enumerate(groups) for name, entry in _entries(f"{file}: groups[{i}]", group).items()
    }
    arrays = load_arrays(path, metadata, like)

    def build(i: int, group: dict[str, Any]) -> Any:
        found = {name: arrays[f"{i}.{name}"] for name in group}
        if hasattr(kind, "restored"):
            return kind.restored(found)
        if dataclasses.is_dataclass(kind):
            if any(array.shape for array in found.values()):
                raise ValueError(f"{file}: groups[{i}]: must hold numbers, of shape []")
            return kind(**{name: array.item() for name, array in found.items()})
        return kind(**dict.fromkeys(kind._fields) | found)

    return tuple(None if group is None else build(i, group) for i, group in enumerate(groups))


def _entries(place: str, group: Any) -> dict[str, Any]:
    if group is not None and not isinstance(group, dict):
        raise ValueError(f"{place}={short(group)}: must be an object or null")
    return group or {}


def _dtypes(kind: Any, name: str) -> tuple[str, ...]:
    """What an array of bases of that type may be; some declare which of theirs may be quantised."""
    return (*FLOATS, "int8") if name in getattr(kind, "quantised", ()) else FLOATS


def _abstract(place: str, known: bool, dtypes: tuple[str, ...], entry: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a saved array."""
    if not known:
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
    if hasattr(group, "saved"):
        return group.saved()
    if dataclasses.is_dataclass(group):
        return {f.name: jax.numpy.asarray(getattr(group, f.name)) for f in dataclasses.fields(group)}
    return {name: x for name, x in group._asdict().items() if x is not None}


def _shapes(group: Any) -> dict[str, Any]:
    return {name: {"shape": list(x.shape), "dtype": x.dtype.name} for name, x in _fields(group).items()}
