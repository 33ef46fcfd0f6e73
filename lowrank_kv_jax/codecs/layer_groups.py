"""Groups of adjacent layers, and the ranks of the bases that they share."""

from typing import NamedTuple

from lowrank_kv_jax.estimators.rank import resolve_rank


class Ranks(NamedTuple):
    """Columns of the bases of keys and values."""

    k: int
    v: int


def stride_groups(num_layers: int, size: int, first: int = 0) -> tuple[tuple[int, ...], ...]:
    """Contiguous groups of `size` layers from layer `first` on; the layers before stay alone, the last group
    may be smaller."""
    alone = tuple((layer,) for layer in range(first))
    starts = range(first, num_layers, size)
    return alone + tuple(tuple(range(s, min(s + size, num_layers))) for s in starts)


SPLIT_MULTIPLE = 8
"""Of the two ranks that a chosen mean is split into: finer than the mean's own multiple, which would bend the ratio."""


def split_rank(mean: int, width: int, ratio: float, multiple: int = 1) -> Ranks:
    """Ranks of keys and values of a given mean, as 1 : `ratio` (xKV, section 5.1), within the width.

    Args:
        mean: at most the width.
        width: of the bases.
        ratio: rank of the values to that of the keys.
        multiple: of both ranks, where they are below the width and the mean leaves room for one of each.
    """
    multiple = multiple if mean >= multiple else 1
    v = min(multiple * round(2 * mean * ratio / (1 + ratio) / multiple), width, 2 * mean - multiple)
    v = max(v, multiple, 2 * mean - width)
    k = 2 * mean - v
    return Ranks(width if k >= width else k - k % multiple, v)


def read_table(text: str, groups: int) -> tuple[tuple[int, int], ...]:
    """Ranks of every group from "k:v/k:v/..", one entry for each of `groups`.

    Raises:
        ValueError: another form, or another number of entries.
    """
    entries = text.split("/")
    try:
        table = tuple((int(k), int(v)) for k, v in (entry.split(":") for entry in entries))
    except ValueError:
        raise ValueError(f"table={text!r}: expected a pair k:v for each group, as 96:144/80:120") from None
    if len(table) != groups:
        raise ValueError(f"table={text!r}: has {len(table)} entries, this model has {groups} groups")
    return table


def resolve_pair(width: int, k: tuple[str, int | float], v: tuple[str, int | float]) -> Ranks:
    """Ranks from two fields (name, value), each an int or a fraction of the width."""
    return Ranks(resolve_rank(*k, width), resolve_rank(*v, width))
