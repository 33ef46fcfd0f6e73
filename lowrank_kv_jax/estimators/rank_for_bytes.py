"""The rank at which a cache has a wanted size: all of its bytes, those of the bases too."""

from collections.abc import Callable
from typing import Any

from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.accounting import full_cache_bytes, state_bytes


def largest_rank(make: Callable[[int], Any], width: int, layout: Layout, layers: int, smaller: float) -> int:
    """The largest rank in 1..width whose state is `smaller` times smaller than 16-bit keys and values.

    Args:
        make: rank -> the state of a group of layers, or its shapes.
        width: W of the basis.
        layout: its prompt and capacity count: room for new tokens is a part of both caches.
        layers: of the group.
        smaller: wanted ratio.

    Raises:
        ValueError: the prompt is too short for that, with what the smallest rank takes.
    """
    full = full_cache_bytes(layout.spec, layout.batch * layout.capacity) * layers // layout.spec.num_layers
    target = full / smaller
    low, high = 0, width
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if state_bytes(make(middle)) <= target else (low, middle - 1)
    if low == 0:
        raise ValueError(
            f"smaller={smaller}: a prompt of {layout.prompt} tokens (capacity {layout.capacity}) is too short for "
            f"it: at rank 1 a group takes {state_bytes(make(1))} bytes of the {int(target)} wanted, bases and exact "
            f"tokens included; use a smaller ratio, fewer sinks and recent tokens, or a longer prompt"
        )
    return low
