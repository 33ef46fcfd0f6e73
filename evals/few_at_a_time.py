"""Many methods in one process: a few share a prefill, and their programs are dropped before the next."""

import gc
from collections.abc import Iterator, Mapping

import jax

from lowrank_kv_jax.method import KVMethod


def few_at_a_time(methods: Mapping[str, KVMethod], size: int) -> Iterator[dict[str, KVMethod]]:
    """Methods by spec in groups of at most `size`, in order.

    What a group compiled is freed when the next one is asked for: each program holds memory maps, which an operating
    system counts (65,530 a process are the default of Linux), and those of fifty methods are too many.
    """
    specs = list(methods)
    for begin in range(0, len(specs), size):
        yield {spec: methods[spec] for spec in specs[begin : begin + size]}
        jax.clear_caches()
        gc.collect()
