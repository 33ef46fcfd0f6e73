"""Which pages of a store the queries of a step need, and the store with these alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.layout import Layout, Place
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.positions import PerHead


def read(machine: Any, layout: Layout, state: Any, q: jax.Array, place: Place) -> Any:
    """The store of a group's state with the pages alone that the queries of one layer need."""
    if not state.marks or place.window is not None:  # a sliding window is one run of tokens
        return state.store
    reading, marks, tokens = machine.standing_reading, state.marks[place.index], state.store.tokens
    there = jax.tree.leaves(marks)[0].shape[2]
    count = reading.pages(layout, there)
    if count >= there:
        return state.store
    units = tokens.k.shape[1]
    chosen = choose(reading, marks, tokens.length, q, layout.spec.scale, units, count)
    return dataclasses.replace(state.store, tokens=take(tokens, chosen, reading.page, layout.spec.kv_heads))


def choose(
    reading: Reading, marks: Any, lengths: jax.Array, q: jax.Array, scale: float, units: int, count: int
) -> jax.Array:
    """The `count` pages that queries `[B, T, N, D]` need most, int32 `[B, U, count]`, ascending.

    Queries that share a page's tokens add up their softmax over the pages: of one query that orders pages as its logits
    do. The last page comes first, pages without a token last.

    Args:
        units: U, which share their tokens' codes and so their pages.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads = jax.tree.leaves(marks)[0].shape[1]
    q = q.astype(jnp.float32).reshape(batch, tokens, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    logits = reading.logits(marks, q.reshape(batch, kv_heads, -1, dim)) * scale
    pages = jnp.arange(logits.shape[-1])
    last = ((lengths - 1) // reading.page)[:, None]
    there = (pages <= last)[:, None]
    share = jax.nn.softmax(jnp.where(there[:, :, None], logits, -1e30), axis=-1).sum(2)
    share = share.reshape(batch, units, -1, share.shape[-1]).sum(2)
    share = jnp.where(there, jnp.where((pages == last)[:, None], jnp.inf, share), -1.0)
    return jnp.sort(jax.lax.top_k(share, count)[1], axis=-1)


def take(tokens: Any, chosen: jax.Array, size: int, kv_heads: int) -> Any:
    """A segment of the tokens of pages `chosen` `[B, U, C]` alone; quantised ones are widened."""
    starts = chosen * size
    slots = (starts[..., None] + jnp.arange(size)).reshape(*chosen.shape[:2], -1)

    def at(positions: Any, of_units: jax.Array) -> jax.Array:
        return jax.vmap(lambda own: positions_of(positions).at(own)[0])(of_units)

    def positions_of(row: Any) -> Any:
        return jax.tree.map(lambda x: x[None], row)

    position = jax.vmap(at)(tokens.positions, slots)
    # only the last page may hold fewer tokens than `size`, and every unit reads it: valid tokens stay in front
    length = jnp.clip(tokens.length[:, None] - starts[:, 0], 0, size).sum(1)
    k, v = (_gather(x, starts, size) for x in (tokens.k, tokens.v))
    return dataclasses.replace(tokens, k=k, v=v, length=length, positions=PerHead(position, None, kv_heads))


def _gather(stored: Any, starts: jax.Array, size: int) -> jax.Array:
    """Tokens `[B, U, C * size, R]` of a storage from `starts` `[B, U, C]`."""

    def pages(own: Any, begins: jax.Array) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None, None], own)
        return jax.vmap(lambda begin: slice_block(alone, begin, size)[0, 0])(begins)

    found = jax.vmap(jax.vmap(pages))(stored, starts)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])
