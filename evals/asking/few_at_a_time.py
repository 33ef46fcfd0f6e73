"""Many methods in one process: a few share a prefill, and their programs are dropped before the next."""

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from lowrank_kv_jax.method import Part

MOST_MAPS = 40_000
"""Memory maps of a process, of the 65,530 that Linux allows by default, at which programs are dropped."""


def few_at_a_time(methods: Mapping[str, Part], size: int) -> Iterator[dict[str, Part]]:
    """Methods by spec in groups of at most `size`, in order.

    What a group compiled is freed when the next one is asked for: each program holds memory maps, which an operating
    system counts (65,530 a process are the default of Linux), and those of fifty methods are too many.
    """
    specs = list(methods)
    for begin in range(0, len(specs), size):
        yield {spec: methods[spec] for spec in specs[begin : begin + size]}
        drop_programs()


def drop_programs() -> None:
    """Free what was compiled; what is called again is compiled again."""
    jax.clear_caches()
    gc.collect()


def drop_programs_if_many() -> bool:
    """`drop_programs` where they hold so many memory maps that the next ones might get none, which ends the process.

    A method whose layers differ in shape has as many programs as layers, for every size of a batch. Where the operating
    system does not say how many maps there are, nothing is done.

    Returns:
        Whether they were dropped.
    """
    try:
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return False
    if maps > MOST_MAPS:
        drop_programs()
    return maps > MOST_MAPS
