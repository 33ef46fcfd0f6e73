"""Laying a cache out over a mesh with the axes "data" (rows of the batch), "model" (kv heads) and "tokens" (slots)."""

import math
import os
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.storage.state import LeafInfo, map_leaves

_Tree = TypeVar("_Tree", bound=Any)
MESH_AXES = ("data", "model", "tokens")
MOST_SIMULATED = 64
"""Devices on a CPU for which threads are asked for: a mesh that was mistyped must not start thousands."""
OF_AXIS = {"batch": "data", "kv_heads": "model", "tokens": "tokens"}


def make_mesh(text: str) -> Mesh:
    """A mesh from `data=2,model=3` over the first devices; "data" and "model" that are not named have size 1.

    Raises:
        ValueError: unknown axes, sizes below 1, or more devices than there are.
    """
    sizes: dict[str, int] = dict.fromkeys(MESH_AXES[:2], 1)
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if axis.strip() not in MESH_AXES or not size.strip().isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {text!r}: expected axis=size with axes {', '.join(MESH_AXES)}, sizes at least 1")
        sizes[axis.strip()] = int(size)
    needed = math.prod(sizes.values())
    devices = _devices(threads=8 * min(needed, MOST_SIMULATED))
    if needed > len(devices):
        raise ValueError(f"mesh {text!r} needs {needed} devices, there are {len(devices)}")
    return Mesh(np.array(devices[:needed]).reshape(tuple(sizes.values())), tuple(sizes))


def _devices(threads: int) -> list[Any]:
    """All devices; those simulated on a CPU share a pool of at least so many threads.

    They meet in collectives on it: with fewer threads than collectives under way they wait for ever. The pool has a
    thread for each core, or what NPROC says while the backend starts; accelerators ignore it, and processes that are
    started later must not inherit it.
    """
    if "NPROC" in os.environ:
        return jax.devices()
    os.environ["NPROC"] = str(max(threads, os.cpu_count() or 1))
    try:
        return jax.devices()
    finally:
        del os.environ["NPROC"]


def check_axes(mesh: Any) -> None:
    """Raise ValueError for what is no mesh, or has axes other than data, model and tokens."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh={short(mesh)}: must be a jax.sharding.Mesh with axes of {MESH_AXES}, or None")
    if unknown := sorted(set(mesh.axis_names) - set(MESH_AXES)):
        raise ValueError(f"mesh axes {unknown}: must be of {MESH_AXES}")


def rows_together(mesh: Mesh | None) -> int:
    """In multiples of how many rows a mesh takes a batch.

    Raises:
        ValueError: as `check_axes`.
    """
    if mesh is None:
        return 1
    check_axes(mesh)
    return mesh.shape.get("data", 1)


def check_mesh(mesh: Mesh, spec: AttentionSpec, batch: int) -> Mesh:
    """The mesh as `propagated`, if batch and heads can be cut over it.

    Raises:
        ValueError: as `check_axes`; `data` that does not divide the batch, `model` that does not divide the kv heads.
    """
    check_axes(mesh)
    if batch % mesh.shape.get("data", 1):
        raise ValueError(f"the mesh axis data={mesh.shape['data']} must divide the batch of {batch}")
    if spec.kv_heads % mesh.shape.get("model", 1):
        raise ValueError(f"the mesh axis model={mesh.shape['model']} must divide kv_heads={spec.kv_heads}")
    return propagated(mesh)


def check_weights(mesh: Any, params: Any) -> None:
    """Raise ValueError for weights that are bound to other devices than those of a cache's mesh, if there is one."""
    if not isinstance(mesh, Mesh):
        return
    bound = next((x for x in jax.tree.leaves(params) if getattr(x, "committed", False)), None)
    if bound is not None and bound.sharding.device_set != set(mesh.devices.flat):
        raise ValueError(f"params lie on {len(bound.sharding.device_set)} devices: must lie on the {mesh.size} of the "
                         "mesh, as `load_model(..., mesh=mesh)` lays them")


def propagated(mesh: Any) -> Any:
    """The mesh with axes that the compiler propagates; those of `jax.make_mesh` are told by hand, in every operation."""
    return Mesh(mesh.devices, mesh.axis_names) if isinstance(mesh, Mesh) else mesh


def leaf_sharding(mesh: Mesh, info: LeafInfo, shape: tuple[int, ...]) -> NamedSharding:
    """How a leaf lies on a mesh, see `partition`."""
    return NamedSharding(mesh, partition(mesh, info.axes, shape))


def partition(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Batch over `data`, heads over `model`, slots over `tokens`; what several heads share (one head of coefficients)
    is replicated, and so is what the devices do not divide."""
    cut = []
    for axis, size in zip(axes, shape, strict=True):
        name = OF_AXIS.get(axis or "")
        parts = mesh.shape.get(name, 1) if name else 1
        cut.append(name if parts > 1 and size % parts == 0 else None)
    return PartitionSpec(*cut)


def constrain(mesh: Mesh | None, state: Any) -> Any:
    """Hold every declared leaf of a state to its sharding, inside or outside of jit."""
    if mesh is None:
        return state

    def hold(info, x):
        sharding = leaf_sharding(mesh, info, x.shape)
        if isinstance(x, Tracer):
            return jax.lax.with_sharding_constraint(x, sharding)
        return jax.device_put(x, sharding)

    return map_leaves(hold, state)


def shard_rows(mesh: Mesh | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays whose first axis is the batch, as `partition` cuts a cache's: rows taken out of one need not divide."""
    if mesh is None:
        return arrays
    places = (NamedSharding(mesh, partition(mesh, ("batch", *[None] * (x.ndim - 1)), x.shape)) for x in arrays)
    return tuple(
        jax.lax.with_sharding_constraint(x, place) if isinstance(x, Tracer) else jax.device_put(x, place)
        for x, place in zip(arrays, places, strict=True)
    )


def replicate(mesh: Mesh | None, tree: Any) -> Any:
    """Put small read-only arrays (calibrated bases) on every device of the mesh."""
    if mesh is None:
        return tree
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else jax.device_put(x, place), tree)


def beside(small: _Tree, *trees: Any) -> _Tree:
    """A tree of arrays bound to the device that any of the others is bound to, as all is that is computed of both."""
    bound = (x.sharding for x in jax.tree.leaves(trees) if getattr(x, "committed", False))
    place = next((x for x in bound if isinstance(x, SingleDeviceSharding)), None)
    return small if place is None else jax.device_put(small, place)


def to_host(x: jax.Array) -> np.ndarray:
    """The whole array in every process, also where its shards lie on devices of several processes."""
    if getattr(x, "is_fully_addressable", True):
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
