"""Cache states: pytrees whose every leaf says what its axes are and what its bytes are spent on.

The sharding rules, the byte accountant and the batch operations (fork, insert, remove rows) all read these
declarations, so a new method gets them for nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
from jaxtyping import Int, Shaped

from lowrank_kv_jax.storage.backend import on_gpu
from lowrank_kv_jax.storage.cache_dtype import narrow

KINDS = ("exact", "coefficients", "bases", "scales", "moments", "indices")
AXES = ("batch", "kv_heads", "tokens", "end_tokens", "head_dim", "rank", "width", "chunks", "layers", "bytes")
"""Names of axes: "tokens" are the slots of a store, of which a mesh may give each device a range; "end_tokens" those of
exact ends, of which every device has all."""


class LeafInfo(NamedTuple):
    """Logical axes (a name of `AXES` or None for each dimension) and kind (one of `KINDS`) of a leaf."""

    axes: tuple[str | None, ...]
    kind: str


def leaf(*axes: str | None, kind: str, **kwargs: Any) -> Any:
    """Declare an array field of a `@state` class."""
    unknown = [a for a in axes if a is not None and a not in AXES]
    if unknown or kind not in KINDS:
        raise ValueError(f"leaf{axes} of kind {kind!r}: axes must be of {AXES}, kind of {KINDS}")
    return dataclasses.field(metadata={"leaf": LeafInfo(axes, kind)}, **kwargs)


def static(**kwargs: Any) -> Any:
    """Declare a hashable field of a `@state` class that belongs to the tree structure."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(leaf, static, dataclasses.field))
def state(cls):
    """Class decorator: a frozen dataclass registered as a pytree; fields are leaves, nested states or `static`."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if f.name not in meta]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any, LeafInfo]]:
    """Yield (path, array, info) for every declared leaf below `tree`; None counts as absent.

    Raises:
        TypeError: a leaf that no `@state` class declares.
    """
    for name, info, value in _children(tree):
        here = f"{path}.{name}" if path else name
        if value is None:
            continue
        if info is not None:
            yield here, value, info
        else:
            yield from walk(value, here)


def states(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, state) for every `@state` object below `tree`, outer ones first."""
    for name, info, value in _children(tree):
        if info is None and value is not None:
            here = f"{path}.{name}" if path else name
            if dataclasses.is_dataclass(value):
                yield here, value
            yield from states(value, here)


def map_leaves(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `f(info, array, *others)` to every declared leaf, keeping the structure."""
    if tree is None:
        return None
    if isinstance(tree, tuple | list):
        return type(tree)(map_leaves(f, *items) for items in zip(tree, *rest, strict=True))
    changes = {}
    for name, info, value in _children(tree):
        others = [getattr(r, name) for r in rest]
        if info is None or value is None:
            changes[name] = map_leaves(f, value, *others)
        elif hasattr(value, "moved"):  # an array that is held otherwise
            changes[name] = value.moved(functools.partial(f, info), *others)
        else:
            changes[name] = f(info, value, *others)
    return dataclasses.replace(tree, **changes)


def _children(tree: Any) -> Iterator[tuple[str, LeafInfo | None, Any]]:
    if tree is None:
        return
    if isinstance(tree, tuple | list):
        for i, value in enumerate(tree):
            yield str(i), None, value
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            if not field.metadata.get("static"):
                value = getattr(tree, field.name)
                # a storage of several arrays may stand in the place of one, and declares its own
                info = None if dataclasses.is_dataclass(value) else field.metadata.get("leaf")
                yield field.name, info, value
    else:
        raise TypeError(f"{type(tree).__name__} inside a cache state is not declared with storage.state.leaf")


def write_tokens(
    buffer: Any, new: Shaped[jax.Array, "B J _ _"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"],
    token_axis: int = 2,
) -> Any:
    """Write the first `counts[b]` of `T` tokens of each row at `start[b]`, in place when `buffer` is donated.

    Args:
        buffer: `[B, J, S, R]`, or a storage that writes tokens itself.
        new: `[B, J, T, R]` with T <= S.
        start, counts: int32 `[B]`. Tokens that would fall outside the buffer are dropped, nothing else is touched.
        token_axis: 3 where both are transposed, `[B, J, R, S]`.

    Returns:
        The buffer with O(T) of it changed.
    """
    if hasattr(buffer, "write_tokens"):
        return buffer.write_tokens(new, start, counts)
    tokens, size, axis = new.shape[token_axis], buffer.shape[token_axis], token_axis - 1
    if tokens > size:
        raise ValueError(f"{tokens} tokens written at once into a buffer of {size}")
    new = narrow(new, buffer.dtype)
    if tokens == 1 and axis == 1 and on_gpu():
        return _write_one(buffer, new[:, :, 0], start, counts)

    def row(buf, fresh, begin, count):
        # dynamic slices clamp: near the end the window starts earlier and keeps what it holds there
        at = jnp.clip(begin, 0, size - tokens)
        source = at + jnp.arange(tokens) - begin
        old = jax.lax.dynamic_slice_in_dim(buf, at, tokens, axis=axis)
        if tokens > 1:
            fresh = jnp.take(fresh, jnp.clip(source, 0, tokens - 1), axis=axis)
        keep = (source >= 0) & (source < count)
        keep = keep[None, :, None] if axis == 1 else keep[None, None]
        return jax.lax.dynamic_update_slice_in_dim(buf, jnp.where(keep, fresh, old), at, axis=axis)

    return jax.vmap(row)(buffer, new, start, counts)


def _write_one(buffer: jax.Array, new: jax.Array, start: jax.Array, counts: jax.Array) -> jax.Array:
    """A token `[B, J, R]` written head by head, or dropped: on a GPU one program, which reads nothing of the buffer."""
    at = jnp.where((counts > 0) & (start >= 0), start, buffer.shape[2])
    at = jnp.broadcast_to(at[:, None], new.shape[:2])  # one slot for all heads would be read first

    def head(buf, fresh, slot):
        return buf.at[slot].set(fresh, mode="drop", unique_indices=True)

    return jax.vmap(jax.vmap(head))(buffer, new, at)


def take_tokens(
    buffer: Shaped[jax.Array, "B J S R"], start: Int[jax.Array, " B"], size: int
) -> Shaped[jax.Array, "B J {size} R"]:
    """`size` tokens of each row from `start[b]` on, `[B, J, size, R]`; indices past the end repeat the last token."""
    index = jnp.clip(start[:, None] + jnp.arange(size), 0, buffer.shape[2] - 1)
    return jax.vmap(lambda buf, i: jnp.take(buf, i, axis=1))(buffer, index)
