"""The shapes of an engine's caches, and how many rows they have."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.checks.arrays import is_row
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.generation.forward import check_context
from lowrank_kv_jax.method.accounting import bytes_on_devices
from lowrank_kv_jax.method.layout import Layout, layout_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.selections.reread import CHUNK
from lowrank_kv_jax.serving.chunked import filling_bytes
from lowrank_kv_jax.serving.filling import prefill_rows
from lowrank_kv_jax.serving.plan import Rows, rows_within
from lowrank_kv_jax.serving.pool import Parts
from lowrank_kv_jax.serving.rows import empty_cache

SLOTS = 8
MOST_SLOTS = 64
"""Of a pool, where a budget decides and nobody says otherwise."""


def layouts_of(
    config: ModelConfig, together: int, prompt: int | Sequence[int], room: int, block: int, dtype: Any, mesh: Any
) -> list[Layout]:
    """A layout for each prompt length, rising, of the rows that are filled together.

    Raises:
        ValueError: lengths that are none or twice the same, or that do not fit the model's context.
    """
    widths: list[Any] = list(prompt) if is_row(prompt) else [prompt]  # type: ignore[arg-type]
    for name, value in (*(("prompt", width) for width in widths), ("room", room)):
        check_int(name, value, 1)
        if value >= config.context:
            raise ValueError(f"{name}={value}: the model's context is {config.context} tokens, and there must be room "
                             "behind a prompt")
    if not widths or len(set(widths)) < len(widths):
        raise ValueError(f"prompt={short(prompt)}: must be a length, or several that differ")
    if max(widths) + room > config.context:
        raise ValueError(f"prompt={max(widths)}: with room={room} behind it more than the model's context of "
                         f"{config.context} tokens")
    return [layout_of(config.attention, together, width, width + room, block, dtype, mesh) for width in sorted(widths)]


def check_parts(parts: Parts, layouts: Sequence[Layout], chunk: int | None = None) -> None:
    """Raise ValueError where the method does not suit the model, lacks bases, or cannot read prompts of these lengths, in
    chunks of so many tokens where they are longer."""
    parts.method.validate(parts.config.attention)
    for layout in layouts:
        if chunk is None or chunk >= layout.prompt:
            jax.eval_shape(lambda n=layout: _prefilled(parts, n))
            continue
        if parts.method.rereads:
            check_context(parts.config, layout.prompt, min(chunk, CHUNK))
        filling_bytes(parts, layout, chunk)


def _prefilled(parts: Parts, layout: Layout) -> Any:
    """Prompts of the layout's width, compressed; for what is wrong with them."""
    tokens, lengths = jnp.zeros((layout.batch, layout.prompt), jnp.int32), jnp.ones((layout.batch,), jnp.int32)
    cache = empty_cache(parts.method, layout, parts.bases, 1)
    return prefill_rows(*parts[:3], cache, jnp.arange(layout.batch), tokens, lengths, bases=parts.bases)


def rows_of_pools(
    parts: Parts, layouts: Sequence[Layout], memory: int | None, slots: int | None, prefixes: int,
    chunk: int | None = None,
) -> Sequence[Rows]:
    """Rows of each pool: those that were asked for, or as many as fit into `memory` bytes.

    Args:
        chunk: of prompts that are read in chunks, in rows of their own, which take their part of `memory`.

    Raises:
        ValueError: not even one row of each fits.
    """
    step = layouts[0].batch
    if memory is None:
        wanted = (SLOTS if slots is None else slots, prefixes)
        return [Rows(*(-(-count // step) * step for count in wanted))] * len(layouts)
    shapes = [jax.eval_shape(lambda n=n: empty_cache(parts.method, n, parts.bases, 1)) for n in layouts]
    each = [-(-bytes_on_devices(shape) // step) for shape in shapes]
    if chunk is not None:
        memory -= sum(filling_bytes(parts, layout, chunk) for layout in layouts)
    return rows_within(each, memory, slots or MOST_SLOTS, prefixes, step)
