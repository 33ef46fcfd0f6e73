"""Kernels on several devices: each runs on the rows and heads that its device holds, and nothing is gathered for it.

A compiler cannot cut a kernel apart. Left to itself it hands every device all tokens of all heads, each step anew.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.over_tokens import apart, axes_here, mesh_here
from lowrank_kv_jax.storage.packed import of_some_heads
from lowrank_kv_jax.storage.sharding import OF_AXIS, partition
from lowrank_kv_jax.storage.state import map_leaves

TOKENS = ("batch", "kv_heads", None, None)
QUERIES = ("batch", None, "kv_heads", None)
POSITIONS = ("batch", None)


def devices() -> int:
    """Over how many devices the op is cut."""
    mesh = mesh_here()
    return 1 if mesh is None else mesh.size


def devices_of_heads() -> int:
    """Over how many devices heads are cut."""
    mesh = mesh_here()
    return 1 if mesh is None else mesh.shape.get("model", 1)


def alone() -> bool:
    """Whether what is traced is one device's: there is no other, or each has its own part by `shard_map`."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return jax.device_count() == 1 or bool(kinds) and all(kind == AxisType.Manual for kind in kinds)


def local(
    kernel: Callable[..., Any], specs: Callable[[], Mapping[str, Any]], arguments: Mapping[str, Any], lse: bool = True,
) -> Callable[..., Any]:
    """A kernel that takes `arguments`, each device its own part of them.

    Args:
        specs: by the argument's name, what `cut` and `cut_tokens` return; asked on a mesh alone.
        lse: whether it returns a partial; otherwise its `out` alone.

    Returns:
        What `dispatch.run` calls, with `interpret`.
    """
    mesh, axes = mesh_here(), axes_here()
    if mesh is None or mesh.size == 1 or not axes:
        return lambda interpret: kernel(**arguments, interpret=interpret)

    def on_mesh(interpret: bool) -> Any:
        given = {name: x for name, x in arguments.items() if x is not None}
        rows, heads = (_axis(mesh, name) for name in ("data", "model"))
        out = PartitionSpec(rows, None, heads, None)
        def on_device(given):
            own = {name: _own_heads(x, heads) for name, x in given.items()}
            return kernel(**(arguments | own), interpret=interpret)

        own = jax.shard_map(
            on_device, mesh=mesh, axis_names={*axes},
            in_specs=({name: spec for name, spec in specs().items() if name in given},),
            out_specs=AttnPartial(out, PartitionSpec(rows, None, heads)) if lse else out,
            check_vma=False,  # kernels do not say over which axes their results vary
        )
        return own(given)

    return on_mesh


def local_on_xla(
    attend: Callable[..., AttnPartial], specs: Callable[[], Mapping[str, Any]], arguments: Mapping[str, Any],
    whole: Callable[[], AttnPartial],
) -> Callable[[], AttnPartial]:
    """The same of an op on XLA, whose compiler would rebuild the keys of all heads on every device and exchange them.

    Args:
        attend: takes `arguments`, each device its own part of them.
        whole: all of it, left to the compiler: what devices cannot be told their parts of.
    """

    def run() -> AttnPartial:
        try:
            return local(lambda interpret, **given: attend(**given), specs, arguments)(False)
        except Unsupported:
            return whole()

    return run


def cut(x: Any, axes: tuple[str | None, ...]) -> PartitionSpec:
    """How an array lies: rows over "data", heads over "model" unless all of them share one; slots are not cut here.

    Raises:
        Unsupported: heads that the devices do not divide.
    """
    mesh = mesh_here()
    assert mesh is not None
    axes = tuple(axis if axis in ("batch", "kv_heads") else None for axis in axes)
    found = partition(mesh, axes, x.shape)
    for axis, size, name in zip(axes, x.shape, found, strict=True):
        over = mesh.shape.get(OF_AXIS.get(axis or ""), 1)
        if over > 1 and name is None and not (axis == "kv_heads" and size == 1):
            raise Unsupported(f"{size} {axis} over {over} devices")
    return found


def cut_state(x: Any) -> Any:
    """How the arrays of a state lie, by the axes that it declares."""
    if not dataclasses.is_dataclass(x):
        raise Unsupported(f"tokens stored as {type(x).__name__}, over several devices")
    return map_leaves(lambda info, leaf: cut(leaf, info.axes), x)


def cut_tokens(tokens: CachedTokens, packed: bool = False) -> CachedTokens:
    """How tokens lie.

    Args:
        packed: whether the kernel reads those of heads with budgets of their own, which every device has all of.
    """
    if getattr(tokens.positions, "owner", None) is not None:
        if not packed:
            raise Unsupported("tokens of heads with budgets of their own, over several devices")
        if apart() and (hasattr(tokens.keys, "starts") or hasattr(tokens.values, "starts")):
            raise Unsupported("tiles of heads of which some begin on another device")
    k, v = (cut(x, TOKENS) if isinstance(x, jax.Array) else cut_state(x) for x in (tokens.keys, tokens.values))
    return CachedTokens(k, v, cut(tokens.lengths, ("batch",)), cut_state(tokens.positions))


def _own_heads(x: Any, axis: str | None) -> Any:
    """Tokens of all heads in one buffer as a device reads them whose heads are some of them, counted from 0; else `x`."""
    where = getattr(x, "positions", None)
    if axis is None or getattr(where, "owner", None) is None:
        return x
    heads = where.kv_heads // devices_of_heads()
    first = jax.lax.axis_index(axis) * heads
    own = dataclasses.replace(where, owner=where.owner - first.astype(where.owner.dtype), kv_heads=heads)
    stored = (of_some_heads(y, first, heads) if hasattr(y, "starts") else y for y in x[:2])
    return CachedTokens(*stored, x.lengths, own)


def cut_beside(others: Beside) -> Beside:
    """How other tokens lie, and their queries."""
    tokens, (q, positions) = cut_tokens(others.tokens), (cut(others.q, QUERIES), cut(others.q_positions, POSITIONS))
    return dataclasses.replace(others, q=q, tokens=tokens, q_positions=positions)


def cut_basis(x: jax.Array) -> PartitionSpec:
    """How a basis `[..., J, W, R]` lies, of all rows or of each: by heads, or by the channels of heads that share one."""
    leading = ("batch",) * (x.ndim == 4)
    return cut(x, (*leading, "kv_heads", None, None) if x.shape[-3] > 1 else (*leading, None, "kv_heads", None))


def _axis(mesh: Any, name: str) -> str | None:
    return name if mesh.shape.get(name, 1) > 1 else None
