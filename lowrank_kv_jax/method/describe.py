"""Caches, generations and bases as a table of their parts: shapes, bytes and what these are spent on."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from lowrank_kv_jax.method.accounting import cache_bytes, nbytes
from lowrank_kv_jax.method.description import Description
from lowrank_kv_jax.method.spell import spell_method
from lowrank_kv_jax.storage.state import states, walk

LONGEST = 96  # characters of a text


def describe(thing: Any) -> Description:
    """The parts of a cache, of a `Generation`'s, or of bases; arrays, or their shapes from `jax.eval_shape`.

    Args:
        thing: a `Cache`, a `LayerCache`, a `Generation`, or what `calibrate` returned.

    Returns:
        A description to print; a cache and a `Generation` show it by themselves. Parts that layers have alike stand in
        one line, their bytes added up; "slots used" are those that hold a token, of all rows and layers the fewest and
        the most.
    """
    if hasattr(thing, "cache"):
        found = describe(thing.cache)
        texts = [str(ids) for ids in thing.tokens] if thing.texts is None else [repr(text) for text in thing.texts]
        told = [f"{i}: {text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}" for i, text in enumerate(texts)]
        return dataclasses.replace(found, title=f"Generation from a {found.title}", notes=(*found.notes, *told))
    if not hasattr(thing, "layout"):
        groups = [thing] if not isinstance(thing, Sequence) or hasattr(thing, "_fields") else thing
        lines = _lines([(i,) for i in range(len(groups))], [list(_arrays(group)) for group in groups])
        total = sum(nbytes(x) for x in jax.tree.leaves(thing))
        return Description(f"bases of {len(groups)} groups of layers, {_mib(total)}", lines)
    groups, layers = (thing.groups, thing.method.layer_groups(thing.layout.spec)) if hasattr(thing, "groups") else (
        (thing.group,), [tuple(range(len(thing.group.ends)))])
    size, layout = cache_bytes(thing), thing.layout
    title = f"{type(thing).__name__}: {_spelled(thing.method)}, {_mib(size.total)}"
    if hasattr(thing, "groups"):
        title += f", {size.smaller:.2f}x smaller than a full one in 16 bits"
    spent = ", ".join(f"{kind} {_mib(count)}" for kind, count in size.by_kind.items() if count)
    seen = _numbers(thing.length)
    notes = (
        f"rows: {layout.batch}, tokens seen: {'unknown' if seen is None else ' '.join(map(str, seen))}, room for "
        f"{layout.capacity}, of a block of {layout.block} used: {_one(thing.pending)}", f"spent on: {spent}",
    )
    return Description(title, _lines(layers, [list(_leaves(group)) for group in groups]), notes)


def as_text(self: Any) -> str:
    """`__repr__` of what can be described."""
    return str(describe(self))


def as_html(self: Any) -> str:
    """`_repr_html_` of what can be described."""
    return describe(self)._repr_html_()


class _Leaf(NamedTuple):
    """A leaf of one group: its path, shape, dtype and kind; its bytes, and the slots that are used, of each row."""

    name: tuple[str, str, str, str]
    size: int
    used: tuple[int, ...]


def _leaves(group: Any) -> Iterator[_Leaf]:
    """Of a group of a cache; a layer of its own is one of `ends`, or of the like."""
    lengths = {f"{path}.": _numbers(one.length) for path, one in states((group,)) if hasattr(one, "length")}
    for path, array, info in walk((group,)):
        of_tokens = {"tokens", "end_tokens"} & {*info.axes}
        inside = [used for start, used in lengths.items() if path.startswith(start) and of_tokens]
        name = ".".join(word for word in path.split(".") if not word.isdigit())
        yield _Leaf(_named(name, array, info.kind), nbytes(array), tuple(inside[-1] or ()) if inside else ())


def _arrays(tree: Any) -> Iterator[_Leaf]:
    """Of bases."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        yield _Leaf(_named(jax.tree_util.keystr(path, simple=True, separator="."), array, "bases"), nbytes(array), ())


def _named(name: str, array: Any, kind: str) -> tuple[str, str, str, str]:
    return name, "[" + ", ".join(map(str, array.shape)) + "]", np.dtype(array.dtype).name, kind


def _lines(layers: Sequence[Sequence[int]], groups: Sequence[Sequence[_Leaf]]) -> tuple[tuple[str, ...], ...]:
    """Equal leaves of several layers in one line, and one line for those that are less than a thousandth of all bytes."""
    found: dict[tuple[str, ...], tuple[set[int], list[int], list[int]]] = {}
    for own, leaves in zip(layers, groups, strict=True):
        for leaf in leaves:
            where, used, sizes = found.setdefault(leaf.name, (set(), [], []))
            where.update(own)
            used.extend(leaf.used)
            sizes.append(leaf.size)
    total = sum(sum(sizes) for _, _, sizes in found.values())
    small = {name: sum(sizes) for name, (_, _, sizes) in found.items() if 1000 * sum(sizes) < total}
    lines = [
        (*name, _ranges(sorted(where)), _span(used), f"{sum(sizes) / 1024:.1f}")
        for name, (where, used, sizes) in found.items() if name not in small
    ]
    if small:
        lines.append((f"{len(small)} small ones", "", "", "", "", "", f"{sum(small.values()) / 1024:.1f}"))
    return tuple(lines)


def _span(used: Sequence[int]) -> str:
    return "" if not used else f"{min(used)}" if min(used) == max(used) else f"{min(used)}-{max(used)}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3 5` of 0, 1, 2, 3, 5."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _numbers(x: Any) -> list[int] | None:
    """What an array of this process holds; None of a shape, of a traced array and of one that was donated."""
    if not isinstance(x, jax.Array | np.ndarray) or isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and (x.is_deleted() or not x.is_fully_addressable):
        return None
    return np.ravel(np.asarray(x)).tolist()


def _one(x: Any) -> str:
    found = _numbers(x)
    return "unknown" if found is None else str(found[0])


def _spelled(method: Any) -> str:
    return spell_method(method) if hasattr(method, "name") else repr(method)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**17 else f"{size / 1024:.1f} KiB"
