"""Stored tokens over devices: a mesh's axis "tokens" cuts the slots of a store into ranges, one for each device.

What lies on a device is what leaves declare: those with an axis "tokens" are cut, all others are the same everywhere.
Each device reads and writes its own range, under `shard_map` of that axis alone; rows and heads stay the compiler's. What
all devices need to know of it are sums and partials, never tokens.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from lowrank_kv_jax.storage.state import map_leaves

TOKENS = "tokens"

_MESH: contextvars.ContextVar[Mesh | AbstractMesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def over_mesh(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """What is traced here has caches that lie over this mesh: rows over its axis "data", kv heads over "model", slots of
    stores over "tokens"."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def mesh_here() -> Mesh | AbstractMesh | None:
    """The mesh of what is traced."""
    return _MESH.get()


def axes_here() -> tuple[str, ...]:
    """Axes of that mesh that a program is still to be cut over: within `on_each` all but "tokens"."""
    mesh = _MESH.get()
    if mesh is None:
        return ()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual)


def token_devices() -> int:
    """Over how many devices stores are cut here; within `on_each` a device is alone with its own slots."""
    mesh = _MESH.get()
    return mesh.shape[TOKENS] if mesh is not None and TOKENS in axes_here() else 1


def on_each(f: Callable[..., Any], stored: Any, *whole: Any, out: Any = None) -> Any:
    """`f(number, own, *whole)` on each device, `own` being its slots of what is stored.

    Args:
        f: is given the device's number along the axis, int32, and reduces over `TOKENS` itself what is to be the same
            everywhere.
        stored: a state, or arrays `[B, J, S, ...]`.
        whole: trees of arrays that every device has; what `f` closes over must be no array.
        out: None: what `f` returns is the same on each device. Otherwise it is cut as `stored` ("stored"), or arrays
            `[B, J, S, ...]` are ("slots").
    """
    mesh, count = _MESH.get(), token_devices()
    if mesh is None or count == 1:
        return f(jnp.int32(0), stored, *whole)

    def own(numbers, stored, whole):
        with over_mesh(jax.sharding.get_abstract_mesh()):
            return f(numbers[0], stored, *whole)

    cut = _cut(stored, count)
    to = {None: PartitionSpec(), "stored": cut, "slots": PartitionSpec(None, None, TOKENS)}[out]
    each = jax.shard_map(
        own, mesh=mesh, in_specs=(PartitionSpec(TOKENS), cut, PartitionSpec()), out_specs=to, axis_names={TOKENS},
        check_vma=False,
    )
    return each(jnp.arange(count, dtype=jnp.int32), stored, whole)


def summed(tree: Any) -> Any:
    """Sums over the devices of arrays that each has its part of; within `on_each`."""
    return jax.lax.psum(tree, TOKENS) if apart() else tree


def apart() -> bool:
    """Whether a device is alone with its own slots here."""
    mesh = _MESH.get()
    return mesh is not None and TOKENS in mesh.axis_names and TOKENS not in axes_here()


def begin_of(number: jax.Array, own: Any) -> jax.Array:
    """The first slot of a device's array `[B, J, S, ...]`."""
    return number * own.shape[2]


def own_segments(number: jax.Array, tree: Any) -> Any:
    """A device's part of a store as segments of their own: lengths and positions count from its first slot."""
    if not apart():
        return tree
    if isinstance(tree, tuple | list):
        return type(tree)(own_segments(number, x) for x in tree)
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return tree
    names = [field.name for field in dataclasses.fields(tree)]
    inner = {name: own_segments(number, getattr(tree, name)) for name in names}
    if "on_lanes" in inner and "size" in inner:  # what stands for an array of so many slots
        inner["size"] = inner["on_lanes"].shape[3]
    if "starts" in inner and "codes" in inner:  # heads behind each other
        inner["starts"] = inner["starts"] - begin_of(number, inner["codes"])
    if "positions" in inner and "length" in inner:
        held = inner["k"] if "k" in inner else inner["codes"]
        begin, slots = begin_of(number, held), held.shape[2]
        inner["length"] = jnp.clip(inner["length"] - begin, 0, slots)
        inner["positions"] = inner["positions"].of_device(begin)
    return dataclasses.replace(tree, **inner)


def _cut(stored: Any, count: int) -> Any:
    """How what is stored lies over the axis."""
    if not dataclasses.is_dataclass(stored):
        return jax.tree.map(lambda x: _spec((None, None, TOKENS), x, count), stored)
    return map_leaves(lambda info, x: _spec(info.axes, x, count), stored)


def _spec(axes: tuple[str | None, ...], x: Any, count: int) -> PartitionSpec:
    for axis, size in zip(axes, x.shape, strict=False):
        assert axis != TOKENS or size % count == 0, f"{size} slots over {count} devices"
    return PartitionSpec(*(TOKENS if axis == TOKENS else None for axis in axes))
