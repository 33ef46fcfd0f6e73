"""Chunks of many tokens through a model: of a prompt whose first chunk was prefilled, or of a turn on top of a cache.

The number of a chunk is no part of a program: all chunks of one width share theirs, whatever the length of the text.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from lowrank_kv_jax.generation.groups import given, ingest_group
from lowrank_kv_jax.generation.layers import embed_tokens, last_hidden, layer_read, layer_read_twice, together
from lowrank_kv_jax.method import Part, Place, chunk
from lowrank_kv_jax.method.cache import Cache, check_spec
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.selections.reread import reread_positions
from lowrank_kv_jax.storage.sharding import replicate, shard_rows


def read_chunk(
    method: Part, config: ModelConfig, params: Any, cache: Cache, tokens: Int[jax.Array, "B T"],
    counts: Int[jax.Array, " B"], last: Float[jax.Array, "B 1 H"] | None, *, bases: Any = None, of_prompt: bool,
) -> tuple[Cache, Float[jax.Array, "B 1 H"]]:
    """Read a chunk, exactly within itself and over what the cache holds, and compress it: any T, without `refresh`.

    Pure and traceable. A chunk that a row has no room for is cut without a word: see `check_room`.

    Args:
        cache: donated where the call is compiled, refreshed.
        tokens: int32 `[B, T]`, padded on the right.
        counts: int32 `[B]`, valid tokens of each row; a row of none stays as it is.
        last: the residual stream `[B, 1, H]` at each row's last token so far; None where every row has a token here.
        bases: from `calibrate`, where the method needs them.
        of_prompt: whether the chunk goes on with the prompt, or comes behind it.

    Returns:
        The cache, and `last` with the rows that had a token.
    """
    layout, groups = cache.layout, method.layer_groups(config.attention)
    check_spec(cache, config.attention)
    bases = bases_of_group(method, config.attention, replicate(layout.mesh, bases))
    tokens, counts = shard_rows(layout.mesh, tokens, counts)
    # padding stands where the last token does: beyond the context there may be no position
    ahead = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), jnp.maximum(counts - 1, 0)[:, None])
    positions, width, layer_of = cache.length[:, None] + ahead, tokens.shape[1], layer_read
    if of_prompt and method.rereads:
        layer_of = layer_read_twice
        copies = reread_positions(cache.length + counts, width)
        positions, tokens = jnp.concatenate([positions, copies], axis=1), jnp.concatenate([tokens, tokens], axis=1)
    x, states, configs = embed_tokens(config, params, tokens, positions), [], config.by_layer
    for group, own, state in zip(groups, bases, cache.groups, strict=True):
        taps, seen = [], []
        for index, layer in enumerate(group):
            shape, place = layout.of_layer(layer), Place(index, config.windows[layer])
            mine = given(method, shape, place, state, x)
            x, tap, found = layer_of(
                configs[layer], method, shape, mine.place, params["layers"][layer], own, mine.state, x, positions, counts,
                mine.index,
            )
            taps.append(tap)
            seen.append(found)
        state = ingest_group(
            method, layout.of_group(group), own, state, tuple(taps), tuple(seen), positions[:, :width], counts,
            of_prompt,
        )
        x, state = together(x, state)
        states.append(state)
    found = last_hidden(x[:, :width], counts)
    last = found if last is None else jnp.where((counts > 0)[:, None, None], found, last)
    return dataclasses.replace(cache, groups=tuple(states), length=cache.length + counts), last


def settled(cache: Cache, first: int) -> Cache:
    """The cache of a prompt that has been read to its end.

    Args:
        first: tokens of its first chunk; rows that have no more are those of a whole prompt, to the bit.
    """
    machine, several = machine_of(cache.method), cache.length > first
    return dataclasses.replace(cache, groups=tuple(chunk.settled(machine, state, several) for state in cache.groups))
