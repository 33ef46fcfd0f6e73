"""The prompt of a layer of a decoder of your own, or a turn on top of it, in chunks of any size.

    cache = prefill_layer(plan, taps, lengths, goes_on=True)          # the first chunk, of prompts of these lengths
    out, read = attend_chunk(plan, cache, taps, counts)               # the next one: to itself and to the cache
    cache = add_chunk(plan, cache, read)                              # compressed; of all layers of the plan at once
    cache = end_prompt(cache)                                         # and now a token, or a turn, at a time

Memory is that of a chunk and of the cache; see docs/prefill.md for what becomes of a method between chunks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.groups import ingest_group
from lowrank_kv_jax.generation.groups import read_chunk as read_group
from lowrank_kv_jax.generation.layer_cache import LayerCache, LayerPlan, check_plan, check_taps
from lowrank_kv_jax.generation.rereading import read_chunk_twice
from lowrank_kv_jax.method import Place, chunk
from lowrank_kv_jax.method.filling import guard, next_chunk
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.selections.reread import reread_positions
from lowrank_kv_jax.storage.state import leaf, state


@state
class ReadChunk:
    """What a layer has read of a chunk, for `add_chunk`.

    Attributes:
        taps: of the chunk.
        seen: the votes of its queries, if they have any.
        counts: int32 `[B]`, its tokens; none in rows that have no room for them.
    """

    taps: Any
    seen: Any
    counts: jax.Array = leaf("batch", kind="indices")


def attend_chunk(
    plan: LayerPlan, cache: LayerCache, taps: Taps, counts: jax.Array | np.ndarray | None = None, *, layer: int = 0
) -> tuple[jax.Array, ReadChunk]:
    """Attend from T tokens to themselves, exactly and causally, and to all that a cache holds; which stays as it is.

    Args:
        cache: refreshed, behind its prompt's first chunk or behind its prompt.
        taps: `[B, T, ...]`, T of any size, at `cache.positions(T)`. Where the method reads prompts twice (`kvzip`) and
            the prompt goes on, a copy stands behind the chunk: `[B, 2 T, ...]` at the positions of `prompt_twice(...,
            start=cache.length)`.
        counts: int32 `[B]`, tokens of each row, which stand first; None means all.
        layer: which of the plan's layers, where it is of several.

    Returns:
        The attended values of each query head, float32 `[B, T, N, D]` (2 T with a copy), NaN in rows that have no room
        for the chunk; and what `add_chunk` takes.

    Raises:
        ValueError: a cache of another plan or in the middle of a group, a layer that the plan has not, taps or counts of
            other shapes.
    """
    check_plan(plan, cache)
    if not 0 <= layer < len(plan.windows):
        raise ValueError(f"layer={layer}: the plan is of {len(plan.windows)} layers, so it must lie in "
                         f"0..{len(plan.windows) - 1}")
    if cache.turn:
        raise ValueError(f"a chunk after layer {cache.turn} of a group of {len(plan.windows)}: append to all of them "
                         "first")
    twice = cache.goes_on and plan.method.rereads
    tokens = taps.k.shape[1]
    if twice and tokens % 2:
        raise ValueError(f"taps.k {taps.k.shape}: {plan.method.name} reads prompts twice, and a chunk with its copy has "
                         "an even number of tokens")
    check_taps(cache.layout, taps, tokens)
    block = next_chunk(cache, tokens // 2 if twice else tokens, counts)
    out, taps, seen = _read(
        cache.method, cache.layout, Place(layer, plan.windows[layer]), twice, plan.bases, cache.group,
        taps._replace(x=None), block.positions, block.counts)
    return guard(block, out), ReadChunk(taps, seen, jnp.where(block.fits, block.counts, 0))


def add_chunk(plan: LayerPlan, cache: LayerCache, read: ReadChunk | Sequence[ReadChunk]) -> LayerCache:
    """Compress a chunk that has attended: code it, choose from it, sum up what goes, move or refit bases.

    Args:
        cache: that which it attended to, donated where the call is compiled. Rows without room stay as they are.
        read: of each layer of the plan, from `attend_chunk`.

    Raises:
        ValueError: a cache of another plan, chunks of another number of layers.
    """
    check_plan(plan, cache)
    read = (read,) if isinstance(read, ReadChunk) else tuple(read)
    if len(read) != len(plan.windows):
        raise ValueError(f"chunks of {len(read)} layers: this plan is of {len(plan.windows)} layers that share a store")
    group = ingest_group(
        cache.method, cache.layout, plan.bases, cache.group, tuple(own.taps for own in read),
        tuple(own.seen for own in read), cache.positions(read[0].taps.k.shape[1]), read[0].counts, cache.goes_on)
    return dataclasses.replace(cache, group=group, length=cache.length + read[0].counts)


def end_prompt(cache: LayerCache, first: int | None = None) -> LayerCache:
    """The cache of a prompt that has been read to its end: from here on a token or a turn at a time.

    Args:
        first: tokens of the first chunk, where rows may have had no more: these are then those of a whole prompt, to the
            bit, as `prefill(..., chunk=)` has them.
    """
    several = None if first is None else cache.length > first
    group = chunk.settled(machine_of(cache.method), cache.group, several) if cache.goes_on else cache.group
    return dataclasses.replace(cache, group=group, goes_on=False)


@functools.partial(jax.jit, static_argnames=("method", "layout", "place", "twice"))
def _read(method, layout, place, twice, bases, state, taps, positions, counts):
    """Outputs, float32, the chunk's taps without queries, and its votes."""
    if twice:
        copies = reread_positions(positions[:, 0] + counts, positions.shape[1])
        positions = jnp.concatenate([positions, copies], axis=1)
        out, taps, seen = read_chunk_twice(method, layout, place, bases, state, taps, positions, counts)
    else:
        partial, seen = read_group(method, layout, place, bases, state, taps, positions, counts)
        out = partial.out
    return out.astype(jnp.float32), taps._replace(q=taps.q[..., :0]), seen
