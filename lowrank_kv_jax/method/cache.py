"""A compressed cache as a value: the states of a method's groups, and operations on its rows.

They take the cache of one group (`generation.layer_cache.LayerCache`) as they take that of a whole model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.describe import as_html, as_text
from lowrank_kv_jax.storage.held import hold
from lowrank_kv_jax.storage.lanes import TOKEN_LAYOUTS, lay_out
from lowrank_kv_jax.storage.state import leaf, map_leaves, state, static


@state
class Cache:
    """The cache of a whole model.

    Attributes:
        groups: one state for each of the method's layer groups.
        length: int32 `[B]`, tokens that each row has seen; the position of its next token.
        limit: int32 `[B]`, tokens that each row may see: the capacity, or less (see `KVMethod.limit`).
        pending: int32 scalar, slots used since the last refresh; at most `layout.block`.
        method: the method that made it and alone can read it.
        layout: its static shape.
    """

    groups: tuple[Any, ...]
    length: jax.Array = leaf("batch", kind="indices")
    limit: jax.Array = leaf("batch", kind="indices")
    pending: jax.Array = leaf(kind="indices")
    method: Part = static()
    layout: Layout = static()

    __repr__, _repr_html_ = as_text, as_html


_Cache = TypeVar("_Cache", bound=Any)


def check_cache(cache: Any, name: str = "cache") -> None:
    """Raise ValueError for what is no cache, nor that of a group of layers: a Generation, above all, which holds one."""
    if not (hasattr(cache, "layout") and hasattr(cache, "pending")):
        raise ValueError(f"{name} is a {type(cache).__name__}: must be a cache, such as `.cache` of a Generation")


def check_method(cache: Any, method: Part) -> None:
    """Raise ValueError unless `cache` is one, and `method` made it."""
    check_cache(cache)
    if cache.method != method:
        raise ValueError(f"this cache was made by {cache.method!r}; it cannot be read by {method!r}")


def check_spec(cache: Any, spec: AttentionSpec) -> None:
    """Raise ValueError unless `cache` was made for a model of this attention."""
    if cache.layout.spec != spec:
        raise ValueError("this cache was made for another model: its attention differs")


def fork(cache: _Cache, copies: int | None = None) -> _Cache:
    """A copy that can be continued while the original is kept.

    Args:
        copies: with a number, every row is repeated so many times in a row: several questions on one context become
            one batch.
    """
    check_cache(cache)
    if copies is None:
        return jax.tree.map(jnp.copy, cache)
    check_int("copies", copies, 1)
    return _rebatch(cache, lambda axis, x: jnp.repeat(x, copies, axis=axis), cache.layout.batch * copies)


def take_rows(cache: _Cache, rows: Sequence[int]) -> _Cache:
    """The given rows, in the given order; leaving rows out removes them from the batch."""
    check_cache(cache)
    batch = cache.layout.batch
    wrong = [r for r in rows if not 0 <= r < batch]
    if wrong or not len(rows):
        raise ValueError(f"rows={list(rows)}: must name at least one of the rows 0..{batch - 1}")
    index = jnp.asarray(rows, jnp.int32)
    return _rebatch(cache, lambda axis, x: jnp.take(x, index, axis=axis), len(rows))


_ALIKE = {
    "turn": "both must stand before the same layer of their group",
    "goes_on": "the prompts of both must go on, or of none",
}
"""What all rows of a layer's cache have in common."""


def insert_rows(cache: _Cache, other: _Cache) -> _Cache:
    """The rows of both caches, those of `other` last; the next refresh is due when the nearer of the two was.

    Raises:
        ValueError: the two differ in method or layout; caches of a layer that stand between two of a group, or whose
            prompt goes on, beside one that does not.
    """
    check_cache(other, "other")
    check_method(cache, other.method)
    for name, must in _ALIKE.items():
        own, its = (getattr(one, name, None) for one in (cache, other))
        if own != its:
            raise ValueError(f"{name}={own} and {name}={its}: {must}")
    batch = cache.layout.batch + other.layout.batch
    if dataclasses.replace(cache.layout, batch=batch) != dataclasses.replace(other.layout, batch=batch):
        raise ValueError(f"layouts differ: {cache.layout} and {other.layout}; prefill both with one prompt width, "
                         "capacity, block and dtype")
    layout = dataclasses.replace(cache.layout, batch=batch)
    cache, other = (dataclasses.replace(c, layout=layout) for c in (cache, other))

    def join(info, x, y):
        if "batch" not in info.axes:
            return jnp.maximum(x, y)
        return jnp.concatenate([x, y], axis=info.axes.index("batch"))

    return map_leaves(join, cache, other)


def with_token_layout(cache: _Cache, layout: str) -> _Cache:
    """The cache with its coefficients laid out as `layout`; its static `layout.tokens` says which.

    Of storage in fewer bits than a float all is laid out too (a token's bytes and scales become multiples of 8), but for
    scales of several tokens and several channels, which stays as it is. So do rows that steps read page by page, or a
    page's rows stand behind each other. What does not change is shared with the given cache, which a donating step may
    then not be given too.

    Args:
        layout: "rows", which every backend reads, or "lanes", which the TPU kernels need and XLA reads too.

    Raises:
        ValueError: another word.
    """
    if layout not in TOKEN_LAYOUTS:
        raise ValueError(f"token layout {layout!r}: allowed are {', '.join(TOKEN_LAYOUTS)}")
    if layout == cache.layout.tokens:
        return cache
    states = "groups" if hasattr(cache, "groups") else "group"
    relaid = hold(lay_out(getattr(cache, states), layout), cache.layout.mesh)
    return dataclasses.replace(cache, layout=dataclasses.replace(cache.layout, tokens=layout), **{states: relaid})


def _rebatch(cache: _Cache, change, batch: int) -> _Cache:
    def per_leaf(info, x):
        return change(info.axes.index("batch"), x) if "batch" in info.axes else jnp.copy(x)

    changed = map_leaves(per_leaf, cache)
    return dataclasses.replace(changed, layout=dataclasses.replace(cache.layout, batch=batch))
