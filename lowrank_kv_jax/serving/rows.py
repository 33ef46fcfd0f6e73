"""Rows of a cache read and written where they lie.

`take_rows` and `insert_rows` of `method.cache` make caches of other batches. Here the batch stays and the rows are
traced: one program serves all of them, and a donated cache is changed in place.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.cache import Cache, fork
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.storage.held import hold
from lowrank_kv_jax.storage.sharding import constrain, shard_rows
from lowrank_kv_jax.storage.state import map_leaves

_Tree = TypeVar("_Tree", bound=Any)


def empty_cache(method: Part, layout: Layout, bases: Any, copies: int) -> Cache:
    """A cache that has seen nothing, of `copies` times the rows of `layout`.

    Args:
        bases: as for `prefill`.
    """

    def make(bases):
        own = bases_of_group(method, layout.spec, bases)
        layouts = (layout.of_group(group) for group in method.layer_groups(layout.spec))
        groups = tuple(machine_of(method).init(*of_group) for of_group in zip(layouts, own, strict=True))
        none = jnp.zeros((layout.batch,), jnp.int32)
        return on_mesh(fork(Cache(hold(groups, layout.mesh), none, none, jnp.int32(0), method, layout), copies))

    return jax.jit(make)(bases)


def taken(tree: _Tree, rows: Int[jax.Array | np.ndarray, " n"]) -> _Tree:
    """The rows of every leaf of a state; one that is not there gives the last."""

    def take(info, x):
        return jnp.take(x, rows, axis=info.axes.index("batch"), mode="clip") if "batch" in info.axes else x

    return map_leaves(take, tree)


def put(tree: _Tree, new: _Tree, rows: Int[jax.Array | np.ndarray, " n"]) -> _Tree:
    """A state with `rows` as they are in `new`; those that are not there, of an index beyond the last, are dropped."""

    def write(info, x, y):
        if "batch" not in info.axes:
            return x
        axis = info.axes.index("batch")
        if len(rows) == 1:  # one slice, in place on every backend
            kept = jnp.where(rows[0] < x.shape[axis], y, jax.lax.dynamic_slice_in_dim(x, rows[0], 1, axis))
            return jax.lax.dynamic_update_slice_in_dim(x, kept, rows[0], axis)
        return x.at[(slice(None),) * axis + (rows,)].set(y, mode="drop")

    return map_leaves(write, tree, new)


def rows_of(cache: Cache, rows: Int[jax.Array | np.ndarray, " n"]) -> Cache:
    """These rows as a cache of their own, of as many rows."""
    own = taken(cache, rows)
    return on_mesh(dataclasses.replace(own, layout=dataclasses.replace(cache.layout, batch=len(rows))))


def on_mesh(cache: Cache) -> Cache:
    """Held to where its mesh lays it."""
    mesh = cache.layout.mesh
    length, limit = shard_rows(mesh, cache.length, cache.limit)
    return dataclasses.replace(cache, groups=constrain(mesh, cache.groups), length=length, limit=limit)
