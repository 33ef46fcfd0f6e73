"""Prompts, and what comes behind a shared prefix, written into rows of a running cache: pure functions.

A prompt is attended exactly at a width near its own and compressed as if it were padded to the cache's: what is stored is
what `prefill` stores, at the price of the shorter width. The state of one group of layers at a time exists beside the
cache.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import Coding, last_logits, layer_extend, read_layer, start_reading
from lowrank_kv_jax.generation.groups import compress_group, given, refresh_group, taken_back
from lowrank_kv_jax.generation.layers import embed_tokens
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.method.filling import Block, guard, next_block, with_block
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.serving.rows import on_mesh, put, rows_of, taken
from lowrank_kv_jax.storage.sharding import constrain, shard_rows


def prefill_rows(
    method: Part, config: ModelConfig, params: Any, cache: Cache, rows: Int[jax.Array | np.ndarray, " n"],
    tokens: Int[jax.Array | np.ndarray, "n S"], lengths: Int[jax.Array | np.ndarray, " n"], *, bases: Any = None,
) -> tuple[Cache, Float[jax.Array, "n V"]]:
    """Prefill n prompts into rows of a cache; whatever these held is gone.

    Args:
        cache: donated, refreshed.
        rows: int32; an index beyond the last row is prefilled and dropped.
        tokens: padded on the right, S at most `cache.layout.prompt`.
        lengths: in 1..S.

    Returns:
        The cache, and float32 logits `[n, V]` at the last token of each prompt.
    """
    layout = dataclasses.replace(cache.layout, batch=tokens.shape[0])
    of_groups = bases_of_group(method, config.attention, bases)
    tokens, lengths = shard_rows(layout.mesh, jnp.asarray(tokens), jnp.asarray(lengths))
    reading, states = start_reading(config, params, tokens, lengths, twice=method.rereads), []
    for group, own, state in zip(method.layer_groups(config.attention), of_groups, cache.groups, strict=True):
        taps = []
        for layer in group:
            coding = Coding(method, layout.of_layer(layer), own, lengths)
            reading, tap = read_layer(config, params, layer, reading, coding)
            taps.append(tap._replace(x=None))
        states.append(_compress(method, layout.of_group(group), own, state, rows, tuple(taps), lengths))
    length, limit = _counted(method, layout, cache.length, cache.limit, rows, lengths)
    logits = last_logits(config, params, reading.x[:, : tokens.shape[1]], lengths)
    return dataclasses.replace(cache, groups=tuple(states), length=length, limit=limit), logits


@functools.partial(jax.jit, static_argnames=("method", "layout"), donate_argnames=("state",))
def _compress(method, layout: Layout, bases, state, rows, taps: tuple[Taps, ...], lengths):
    padded = tuple(pad_taps(tap, layout.prompt) for tap in taps)
    return constrain(layout.mesh, put(state, compress_group(method, layout, bases, padded, lengths), rows))


@functools.partial(jax.jit, static_argnames=("method", "layout"), donate_argnames=("length", "limit"))
def _counted(method, layout: Layout, length, limit, rows, lengths):
    own = machine_of(method).limit(layout, lengths)
    return shard_rows(layout.mesh, *(x.at[rows].set(y, mode="drop") for x, y in ((length, lengths), (limit, own))))


def pad_taps(taps: Taps, tokens: int) -> Taps:
    """Taps of so many tokens, those that are new all zero."""
    more = tokens - taps.k.shape[1]
    if not more:
        return taps
    q, k, k_pre, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in taps[:4])
    reread = None if taps.reread is None else jnp.pad(taps.reread, ((0, 0), (0, 0), (0, more)))
    return taps._replace(q=q, k=k, k_pre=k_pre, v=v, reread=reread)


def extend_rows(
    method: Part, config: ModelConfig, params: Any, cache: Cache, rows: Int[jax.Array | np.ndarray, " n"],
    tokens: Int[jax.Array | np.ndarray, "n T"], counts: Int[jax.Array | np.ndarray, " n"], *, bases: Any = None,
) -> tuple[Cache, Float[jax.Array, "n V"]]:
    """Append T <= `block` tokens to rows of a cache, and refresh these rows alone.

    Args:
        cache: donated, refreshed.
        rows, tokens: as for `prefill_rows`.
        counts: int32, valid tokens of each row.

    Returns:
        The cache, and float32 logits `[n, V]` at the last token of each row, NaN where they did not fit.
    """
    of_groups, configs = bases_of_group(method, config.attention, bases), config.by_layer
    layout = dataclasses.replace(cache.layout, batch=tokens.shape[0])
    length, block, x = _next(config, params, dataclasses.replace(cache, groups=()), rows, tokens, counts)
    states = []
    for group, own, state in zip(method.layer_groups(config.attention), of_groups, cache.groups, strict=True):
        shape = layout.of_group(group)
        for index, layer in enumerate(group):
            place = Place(index, config.windows[layer])
            mine = given(method, shape, place, state, x)
            x, after = _extend(
                configs[layer], method, shape, mine.place, params["layers"][layer], own, mine.state, rows, x,
                block.positions, block.counts, mine.index,
            )
            state = taken_back(state, place, mine, after)
        states.append(_refresh(method, shape, own, state, rows))
    logits = guard(block, last_logits(config, params, x, block.counts))
    return dataclasses.replace(cache, groups=tuple(states), length=length), logits


@functools.partial(jax.jit, static_argnames=("config",))
def _next(config, params, counters: Cache, rows, tokens, counts) -> tuple[jax.Array, Block, jax.Array]:
    """Lengths with the new tokens, where these go, and their embeddings, from a cache without its groups."""
    own = rows_of(counters, rows)
    block = next_block(own, tokens.shape[1], counts)
    x = embed_tokens(config, params, tokens, block.positions)
    return put(counters, with_block(own, block), rows).length, block, x


@functools.partial(jax.jit, static_argnames=("config", "method", "layout", "place"), donate_argnames=("state",))
def _extend(config, method, layout, place, layer, bases, state, rows, x, positions, counts, index):
    own = constrain(layout.mesh, taken(state, rows))
    x, own = layer_extend(config, method, layout, place, layer, bases, own, x, positions, counts, index)
    return x, constrain(layout.mesh, put(state, own, rows))


def refresh_rows(method: Part, cache: Cache, rows: Int[jax.Array | np.ndarray, " n"], *, bases: Any = None) -> Cache:
    """`refresh` of these rows alone; the cache is donated."""
    spec, layout = cache.layout.spec, dataclasses.replace(cache.layout, batch=len(rows))
    of_groups = zip(method.layer_groups(spec), bases_of_group(method, spec, bases), cache.groups, strict=True)
    states = (_refresh(method, layout.of_group(group), own, state, rows) for group, own, state in of_groups)
    return dataclasses.replace(cache, groups=tuple(states))


@functools.partial(jax.jit, static_argnames=("method", "layout"), donate_argnames=("state",))
def _refresh(method, layout, bases, state, rows):
    own = refresh_group(method, layout, bases, constrain(layout.mesh, taken(state, rows)))
    return constrain(layout.mesh, put(state, own, rows))


@functools.partial(jax.jit, donate_argnames=("cache",))
def copy_rows(
    cache: Cache, rows: Int[jax.Array | np.ndarray, " n"], other: Cache, source: Int[jax.Array | np.ndarray, " n"]
) -> Cache:
    """The cache, which is donated, with `rows` as are those of `source` in another one: a fork of a shared prefix."""
    return on_mesh(put(cache, rows_of(other, source), rows))
