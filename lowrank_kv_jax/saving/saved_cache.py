"""Compressed caches on disk: a conversation saved today and continued tomorrow."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.checks.bounds import MOST
from lowrank_kv_jax.checks.json_objects import check_fields
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.saving.checkpoint import FLOATS, METADATA, load_arrays, load_metadata, save_arrays
from lowrank_kv_jax.saving.streams import BLOCK, Widths, from_streams, stream_sizes, to_streams
from lowrank_kv_jax.storage.bits import Bits, hold_bits
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.on_host import OnHost
from lowrank_kv_jax.storage.sharding import check_mesh, leaf_sharding, to_host
from lowrank_kv_jax.storage.state import map_leaves, states, walk

KIND = "cache"
_LEAST = {"batch": 1, "prompt": 0, "capacity": 1, "block": 1}
_STORED = (*_LEAST, "dtype", "tokens")
_CODED = "coded"
"""The field of a compressed save with dtypes and shapes of the arrays that its streams hold."""
_FIELDS = {"method": str, "model": str, "fingerprint": str, "bases": (str, type(None)), "layout": dict}


def save_cache(path: str | Path, cache: Cache, model: Any, *, bases: Any = None, compress: bool = False) -> None:
    """Save a cache of `model` (a `LoadedModel`) to the directory `path`.

    Args:
        bases: those that the cache was made with; not saved, but known again.
        compress: bytes that are alike lie together, which zstd codes in fewer; `load_cache` gives the same cache back, to
            the bit. The arrays pass through the memory of the host, and only this library reads them again.

    Raises:
        ValueError: the cache is of another model.
    """
    if cache.layout.spec != model.config.attention:
        raise ValueError(f"this cache is not of model {model.name!r}: its attention differs")
    metadata = {
        "method": repr(cache.method), "model": model.name, "fingerprint": model.fingerprint, "bases": _digest(bases),
        "layout": {field: getattr(cache.layout, field) for field in _STORED},
    }
    # bits on a CPU are saved as the bfloat16 numbers that they are: every platform loads them
    arrays = {name: x.widened() if isinstance(x, Bits | OnHost) else x for name, x, _ in walk(cache)}
    if compress:
        metadata[_CODED] = {name: _described(x) for name, x in arrays.items()}
        whole = {name: to_host(x) for name, x in arrays.items()}
        save_arrays(path, KIND, to_streams(whole, _widths(cache)), metadata, BLOCK)
    else:
        save_arrays(path, KIND, arrays, metadata)


def load_cache(
    path: str | Path, method: Part, model: Any, *, bases: Any = None, mesh: jax.sharding.Mesh | None = None
) -> Cache:
    """Load a cache that `method` made for `model`, compressed or not.

    Args:
        bases: those that the cache was made with, where the method is calibrated.
        mesh: lay it out over these devices.

    Raises:
        ValueError: it belongs to another method, model or bases, or its arrays do not fit.
    """
    metadata = load_metadata(path, KIND)
    file = behind_links(path) / METADATA
    check_fields(file, metadata, _FIELDS)
    if metadata["fingerprint"] != model.fingerprint:
        raise ValueError(f"{path}: this cache belongs to model {short(metadata['model'])} with other weights "
                         f"({metadata['fingerprint'][:12]}), not to {model.name!r} ({model.fingerprint[:12]})")
    if metadata["method"] != repr(method):
        raise ValueError(f"{path}: this cache was made by {metadata['method']:.500}, not by {method!r}")
    if metadata["bases"] != _digest(bases):
        raise ValueError(f"{path}: this cache was made with other calibrated bases than those given")
    fields = _checked_layout(file, metadata["layout"])
    try:
        layout = Layout(spec=model.config.attention, **fields)
    except ValueError as error:
        raise ValueError(f"{file}: layout: {error}") from error
    if mesh is not None:
        layout = dataclasses.replace(layout, mesh=check_mesh(mesh, layout.spec, layout.batch))
    abstract = _abstract_arrays(method, layout, bases)
    like = {name: x.held if isinstance(x, OnHost) else x for name, x, _ in walk(abstract)}
    if _CODED in metadata:
        arrays = _load_streams(path, metadata, like, _widths(abstract))
    else:
        arrays = load_arrays(path, metadata, like)
    in_order = iter([arrays[name] for name, _, _ in walk(abstract)])
    return hold_bits(map_leaves(lambda info, _: next(in_order), abstract))


def _load_streams(
    path: str | Path, metadata: dict[str, Any], like: Mapping[str, jax.ShapeDtypeStruct], widths: Widths
) -> dict[str, jax.Array]:
    """The arrays of a save with `compress`, laid out as `like`."""
    file = behind_links(path) / METADATA
    check_fields(file, metadata, {_CODED: dict})
    saved, wanted = metadata[_CODED], {name: _described(x) for name, x in like.items()}
    wrong = [name for name in sorted({*saved, *wanted}) if saved.get(name) != wanted.get(name)]
    if wrong:
        name, others = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(f"{file}: {_CODED}: what was saved does not fit: {name}: {short(saved.get(name))}, expected "
                         f"{wanted.get(name)!r}{others}")
    # arrays without memory of their own, for their shapes: Orbax gives NumPy's back where it is shown NumPy's
    shapes = {name: np.broadcast_to(np.uint8(0), size) for name, size in stream_sizes(like, widths).items()}
    arrays = from_streams(load_arrays(path, metadata, shapes), like, widths)
    return {name: jax.device_put(x, like[name].sharding) for name, x in arrays.items()}


def _described(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"


def _widths(cache: Cache) -> Widths:
    """Of the packed arrays of a cache, by the names of `walk`."""
    packed = ((path, held) for path, held in states(cache) if hasattr(held, "widths"))
    return {f"{path}.{leaf}": widths for path, held in packed for leaf, widths in held.widths.items()}


def _checked_layout(file: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The saved fields of a `Layout`, those and no others."""
    check_fields(f"{file}: layout", layout, dict.fromkeys(_LEAST, int) | {"dtype": str, "tokens": str})
    for name, least in _LEAST.items():
        if not least <= layout[name] <= MOST:
            raise ValueError(f"{file}: layout: {name}={short(layout[name])}: must lie in {least}..{MOST}")
    if layout["dtype"] not in FLOATS:
        raise ValueError(f"{file}: layout: dtype={short(layout['dtype'])}: must be one of {', '.join(FLOATS)}")
    if layout["tokens"] not in ("rows", "lanes"):
        raise ValueError(f"{file}: layout: tokens={short(layout['tokens'])}: must be 'rows' or 'lanes'")
    return {name: layout[name] for name in _STORED}


def _digest(bases: Any) -> str | None:
    leaves = jax.tree.leaves(bases)
    if not leaves:
        return None
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def abstract_cache(method: Part, layout: Layout, bases: Any = None) -> Cache:
    """The shapes, dtypes and shardings of a cache, nothing allocated; `cache_bytes` reads it as it reads a cache."""
    return hold_bits(_abstract_arrays(method, layout, bases))


def _abstract_arrays(method: Part, layout: Layout, bases: Any) -> Cache:
    """The same with bfloat16 everywhere, as it is saved."""
    bases = bases_of_group(method, layout.spec, bases)
    groups = tuple(jax.eval_shape(lambda b=b: lay_out(machine_of(method).init(layout, b), layout.tokens)) for b in bases)
    rows: Any = jax.ShapeDtypeStruct((layout.batch,), jnp.int32)
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32)
    cache = Cache(groups, rows, rows, scalar, method, layout)
    mesh = layout.mesh

    def place(info, x):
        sharding = None if mesh is None else leaf_sharding(mesh, info, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return map_leaves(place, cache)
