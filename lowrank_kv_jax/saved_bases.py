"""Calibrated bases on disk, with all that decides whether a model and a method may use them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lowrank_kv_jax import __version__
from lowrank_kv_jax.checkpoint import METADATA, load_arrays, load_metadata, save_arrays
from lowrank_kv_jax.corpus import Corpus
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.parse import spell_method

KIND = "bases"


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


def check_replaceable(path: str | Path) -> None:
    """Raise FileExistsError now, not after minutes of calibration, if `save_bases` would refuse `path`."""
    path = Path(path).expanduser()
    if path.exists() and not (path / METADATA).is_file():
        raise FileExistsError(f"{path} exists and does not hold saved {KIND}: choose another place")


def load_bases(path: str | Path, model: Any, method: Part) -> tuple[Any, ...]:
    """Load bases that were calibrated for this model and for a method that fits the same ones.

    Fields that `fit` does not depend on may differ: the bases of a static method serve an adaptive one of the
    same ranks (see `Part.fit_key`).

    Raises:
        FileNotFoundError: nothing was saved there.
        ValueError: they are of another model or other weights, were fitted with other fields (each is named),
            or are damaged.
    """
    metadata = load_metadata(path, KIND)
    if metadata["fingerprint"] != model.fingerprint:
        raise ValueError(f"{path}: these bases belong to model {metadata['model']!r} with the weights "
                         f"{metadata['fingerprint'][:12]}, not to {model.name!r} ({model.fingerprint[:12]})")
    wanted, saved = method.fit_key(model.config.attention), metadata["fit"]
    differ = [f"{name}={saved.get(name)!r}, this method asks for {wanted.get(name)!r}"
              for name in sorted(set(wanted) | set(saved)) if wanted.get(name) != saved.get(name)]
    if differ:
        raise ValueError(f"{path}: these bases were calibrated for {metadata['method']!r} and do not serve "
                         f"{spell_method(method)!r}: they have {'; '.join(differ)}")
    return _rebuild(path, method, metadata["groups"])


def describe_bases(path: str | Path) -> dict[str, Any]:
    """What was saved beside the bases: model, fingerprint, method, fit, corpus, settings, versions."""
    return load_metadata(path, KIND)


def _rebuild(path: str | Path, method: Part, groups: list[dict[str, Any] | None]) -> tuple[Any, ...]:
    kind: Any = method.bases_type
    like = {
        f"{i}.{name}": jax.ShapeDtypeStruct(tuple(entry["shape"]), jax.numpy.dtype(entry["dtype"]))
        for i, group in enumerate(groups) for name, entry in (group or {}).items()
    }
    arrays = load_arrays(path, like)

    def build(i: int, group: dict[str, Any]) -> Any:
        found = {name: arrays[f"{i}.{name}"] for name in group}
        if dataclasses.is_dataclass(kind):
            return kind(**{name: array.item() for name, array in found.items()})
        return kind(**dict.fromkeys(kind._fields) | found)

    return tuple(None if group is None else build(i, group) for i, group in enumerate(groups))


def _fields(group: Any) -> dict[str, jax.Array]:
    """Arrays by name; a number that belongs to the tree structure is an array on disk."""
    if group is None:
        return {}
    if dataclasses.is_dataclass(group):
        return {f.name: jax.numpy.asarray(getattr(group, f.name)) for f in dataclasses.fields(group)}
    return {name: x for name, x in group._asdict().items() if x is not None}


def _shapes(group: Any) -> dict[str, Any]:
    return {name: {"shape": list(x.shape), "dtype": x.dtype.name} for name, x in _fields(group).items()}
