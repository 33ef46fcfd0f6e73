"""Fields that count tokens, beside the tokens that there is room for."""

from collections.abc import Iterable
from typing import Any

from lowrank_kv_jax.method.layout import Layout

FIELDS = ("sinks", "recent", "page", "rebuild_block", "group", "chunk", "kernel", "recompress")
"""Of the parts of a method: buffers, or work, grow with them however small the cache is."""
FREE = 2**16
"""What may be asked for in any cache: some presets are meant for longer prompts than they meet."""


def check_token_counts(parts: Iterable[Any], layout: Layout) -> None:
    """Raise ValueError for the first field that would make a small cache take more than the machine has."""
    most = max(layout.capacity, FREE)
    for part in parts:
        for name in FIELDS:
            value = getattr(part, name, None)
            if isinstance(value, int) and value > most:
                raise ValueError(f"{name}={value}: must be at most {most} in a cache of {layout.capacity} tokens")
