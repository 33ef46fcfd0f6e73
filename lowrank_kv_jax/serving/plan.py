"""How many rows a budget of bytes holds."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.shown import short

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_BYTES = 2**62
PREFIX_SHARE = 4
"""Of so many rows that a budget holds, one at the most is taken from requests for a shared prefix."""


class Rows(NamedTuple):
    """Of a pool: rows that requests sit in, and rows that hold shared prefixes."""

    slots: int
    prefixes: int


def parse_bytes(name: str, value: int | str) -> int:
    """A number of bytes, or a text such as "256MiB".

    Raises:
        ValueError: it is neither, or not above 0.
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([KMG]?i?B)\s*", value) if isinstance(value, str) else None
    if isinstance(value, str) and (found is None or found[2] not in UNITS):
        raise ValueError(f"{name}={short(value)}: must be a number and its unit, such as '256MiB'; units are "
                         f"{', '.join(UNITS)}")
    number = value if found is None else round(float(found[1]) * UNITS[found[2]])
    check_int(name, number, 1, MOST_BYTES)
    return int(number)


def rows_within(
    each: Sequence[int], memory: int, most: int, prefixes: int = 0, step: int = 1
) -> tuple[Rows, ...]:
    """Rows of several pools within a budget: one each, then one more of every pool in turn as long as it fits.

    Args:
        each: bytes of a row of every pool.
        memory: bytes of all of them.
        most: requests of a pool.
        prefixes: rows of a pool that are to hold shared prefixes: those that fit beyond `most`, and where these are too
            few, one of `PREFIX_SHARE` at the most.
        step: rows come in so many at a time; `most` and `prefixes` are rounded up to that.

    Raises:
        ValueError: one row each takes more.
    """
    most, prefixes = (-(-count // step) * step for count in (most, prefixes))
    least = step * sum(each)
    if least > memory:
        raise ValueError(f"memory: {memory} bytes are left for rows, one of each length takes {least}; give "
                         f"{least - memory} more, or shorter prompts")
    counts, left = [step] * len(each), memory - least
    grows = True
    while grows:
        grows = False
        for i, size in reversed(list(enumerate(each))):
            if step * size <= left and counts[i] + step <= most + prefixes:
                counts[i], left, grows = counts[i] + step, left - step * size, True
    kept = [max(min(prefixes, count // PREFIX_SHARE) // step * step, count - most) for count in counts]
    return tuple(Rows(count - own, own) for count, own in zip(counts, kept, strict=True))


def widths_of(prompt: int, least: int = 64) -> tuple[int, ...]:
    """Widths that prompts of up to `prompt` tokens are padded to: two for every doubling, rising."""
    found, width = {prompt}, prompt
    while width > least:
        found |= {width, max(-(-3 * width // 4), least)}
        width = -(-width // 2)
    return tuple(sorted(found | {min(least, prompt)}))
