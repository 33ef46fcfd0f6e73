"""What saves of caches have in common: the arrays of a state, and the layout that they are read back in."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.bounds import MOST
from lowrank_kv_jax.checks.json_objects import check_fields
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.files import behind_links
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.saving.checkpoint import FLOATS, METADATA, load_arrays, save_arrays
from lowrank_kv_jax.saving.streams import BLOCK, Widths, from_streams, stream_sizes, to_streams
from lowrank_kv_jax.storage.bits import Bits
from lowrank_kv_jax.storage.on_host import OnHost
from lowrank_kv_jax.storage.sharding import check_mesh, leaf_sharding, to_host
from lowrank_kv_jax.storage.state import map_leaves, states, walk
from lowrank_kv_jax.storage.tokens_last import TokensLast

_LEAST = {"batch": 1, "prompt": 0, "capacity": 1, "block": 1}
_STORED = (*_LEAST, "dtype", "tokens")
_DTYPES = (*FLOATS, "float8_e4m3fn", "float8_e5m2")
"""Of the caches that are saved and loaded."""
_CODED = "coded"
"""The field of a compressed save with dtypes and shapes of the arrays that its streams hold."""


def save_state(path: str | Path, kind: str, state: Any, metadata: Mapping[str, Any], compress: bool) -> None:
    """Write the leaves of a state, with `metadata` to describe them; see `save_arrays`.

    Args:
        compress: as for `save_cache`.
    """
    # what a CPU holds otherwise is saved as the array that it stands for: every platform loads it
    arrays = {name: x.widened() if isinstance(x, Bits | OnHost | TokensLast) else x for name, x, _ in walk(state)}
    if not compress:
        save_arrays(path, kind, {name: x for name, x in arrays.items() if not _empty(x)}, metadata)
        return
    coded = {name: _described(x) for name, x in arrays.items()}
    whole = {name: to_host(x) for name, x in arrays.items()}
    save_arrays(path, kind, to_streams(whole, _widths(state)), {**metadata, _CODED: coded}, BLOCK)


def load_state(path: str | Path, metadata: Mapping[str, Any], abstract: Any) -> Any:
    """The state that was saved, compressed or not.

    Args:
        metadata: of `load_metadata`.
        abstract: its shapes, dtypes and shardings, bfloat16 everywhere.

    Raises:
        ValueError: its arrays do not fit, or are damaged.
    """
    like = {name: x.held if isinstance(x, OnHost) else x for name, x, _ in walk(abstract)}
    if _CODED in metadata:
        arrays = _load_streams(path, metadata, like, _widths(abstract))
    else:
        arrays = load_arrays(path, metadata, {name: x for name, x in like.items() if not _empty(x)})
        nothing = {name: np.zeros(x.shape, x.dtype) for name, x in like.items() if _empty(x)}
        arrays |= {name: jax.device_put(x, like[name].sharding) for name, x in nothing.items()}
    in_order = iter([arrays[name] for name, _, _ in walk(abstract)])
    return map_leaves(lambda info, _: next(in_order), abstract)


def on_mesh(mesh: jax.sharding.Mesh | None, abstract: Any) -> Any:
    """Shapes of a state with the shardings that it has on a mesh."""

    def place(info, x):
        sharding = None if mesh is None else leaf_sharding(mesh, info, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return map_leaves(place, abstract)


def layout_fields(layout: Layout) -> dict[str, Any]:
    """What is saved of a layout.

    Raises:
        ValueError: a dtype that `read_layout` would refuse, so that nobody could load it.
    """
    if layout.dtype not in _DTYPES:
        raise ValueError(f"cache of dtype {layout.dtype}: caches are saved in {', '.join(_DTYPES)}")
    return {field: getattr(layout, field) for field in _STORED}


def read_layout(file: Path, saved: dict[str, Any], spec: AttentionSpec, mesh: jax.sharding.Mesh | None) -> Layout:
    """The layout whose fields were saved.

    Raises:
        ValueError: fields that are missing or out of range, sizes that do not fit each other or the mesh.
    """
    fields = _checked(file, saved)
    try:
        layout = Layout(spec=spec, **fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: layout: {error}") from error
    return layout if mesh is None else dataclasses.replace(layout, mesh=check_mesh(mesh, spec, layout.batch))


def digest_of(bases: Any) -> str | None:
    """SHA-256 of the arrays of bases; None where there are none."""
    leaves = jax.tree.leaves(bases)
    if not leaves:
        return None
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _load_streams(
    path: str | Path, metadata: Mapping[str, Any], like: Mapping[str, jax.ShapeDtypeStruct], widths: Widths
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


def _empty(x: Any) -> bool:
    """Whether an array has no number, as values that are read from the codes of keys: Orbax saves none such."""
    return 0 in x.shape


def _described(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"


def _widths(state: Any) -> Widths:
    """Of the packed arrays of a state, by the names of `walk`."""
    packed = ((path, held) for path, held in states(state) if hasattr(held, "widths"))
    return {f"{path}.{leaf}": widths for path, held in packed for leaf, widths in held.widths.items()}


def _checked(file: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The saved fields of a `Layout`, those and no others."""
    check_fields(f"{file}: layout", layout, dict.fromkeys(_LEAST, int) | {"dtype": str, "tokens": str})
    for name, least in _LEAST.items():
        if not least <= layout[name] <= MOST:
            raise ValueError(f"{file}: layout: {name}={short(layout[name])}: must lie in {least}..{MOST}")
    if layout["dtype"] not in _DTYPES:
        raise ValueError(f"{file}: layout: dtype={short(layout['dtype'])}: must be one of {', '.join(_DTYPES)}")
    if layout["tokens"] not in ("rows", "lanes"):
        raise ValueError(f"{file}: layout: tokens={short(layout['tokens'])}: must be 'rows' or 'lanes'")
    return {name: layout[name] for name in _STORED}
