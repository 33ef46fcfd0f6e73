"""Which pages of a store the queries of a step need, and the store with these alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.method.layout import Layout, Place
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.pallas_kernels.page_choice import choose_pages
from lowrank_kv_jax.pallas_kernels.page_choice.chosen import Chosen
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage import backend
from lowrank_kv_jax.storage.block_reads import gather_blocks
from lowrank_kv_jax.storage.over_tokens import mesh_here
from lowrank_kv_jax.storage.pages_in_rows import ChosenPages
from lowrank_kv_jax.storage.positions import OfPages, PerHead, Runs


def read(machine: Any, layout: Layout, state: Any, q: jax.Array, positions: jax.Array, place: Place) -> Any:
    """The store of a group's state with the pages alone that the queries of one layer need.

    Args:
        positions: int32 `[B, T]` of the queries; behind the first one, those behind the last token that a row holds are
            padding.
    """
    if not state.marks or place.window is not None:  # a sliding window is one run of tokens
        return state.store
    reading, marks, tokens = machine.standing_reading, state.marks[place.held], state.store.tokens
    there, apart = jax.tree.leaves(marks)[0].shape[2], machine.codec.apart(state.store)
    count = min(reading.pages(layout, there), there)
    if count == there and apart is None:
        return state.store
    units = max(tokens.k.shape[1], tokens.v.shape[1])
    newest = exact_tokens.newest(state.ends[place.held])[:, None]
    asks = positions <= jnp.maximum(newest, positions[:, :1])
    chosen = choose(reading, marks, tokens.length, q, asks, units, count, apart, **layout.spec.logits)
    return dataclasses.replace(state.store, tokens=take(tokens, chosen, reading.page, layout.spec.kv_heads))


def choose(
    reading: Reading, marks: Any, lengths: jax.Array, q: jax.Array, asks: jax.Array, units: int, count: int,
    apart: jax.Array | None = None, *, scale: float, cap: float | None = None,
) -> Chosen:
    """The `count` pages that queries `[B, T, N, D]` need most.

    Query heads that share a page's tokens put together their softmax over the pages, each the sum of its T queries: of
    one query that orders pages as its logits do. The last page is always among them.

    Args:
        asks: bool `[B, T]`, which of the queries there are; of one query a row it is all.
        units: U, which share their tokens' codes and so their pages.
        apart: int32 `[B, U, O]`, numbers of pages that are left out.
    """
    batch, queries, heads, dim = q.shape
    kv_heads = jax.tree.leaves(marks)[0].shape[1]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    logits = reading.logits(marks, q.reshape(batch, kv_heads, -1, dim))

    def by_xla() -> Chosen:
        own = logits_of(logits, scale, cap).reshape(batch, units, kv_heads // units, queries, heads // kv_heads, -1)
        pages = _wanted(own, lengths, asks, count, apart, reading)
        starts = pages[:, 0] * reading.page
        # only the last page may hold fewer tokens than others, and every unit reads it: valid tokens stay in front
        return Chosen(pages, jnp.clip(lengths[:, None] - starts, 0, reading.page).sum(1))

    return choose_pages(
        logits, lengths, apart, units=units, queries=queries, count=count, page=reading.page, together=reading.together,
        scale=scale, cap=cap, reference=by_xla)


def _wanted(
    logits: jax.Array, lengths: jax.Array, asks: jax.Array, count: int, apart: jax.Array | None, reading: Reading
) -> jax.Array:
    """Pages int32 `[B, U, count]` of `Chosen`, by logits `[B, U, K / U, T, G, C]`."""
    pages = jnp.arange(logits.shape[-1])
    last = ((lengths - 1) // reading.page)[:, None]
    there = (pages <= last)[:, None]
    there = there if apart is None else there & ~(apart[..., None] == pages).any(2)
    share = jax.nn.softmax(jnp.where(there[:, :, None, None, None], logits, -1e30), axis=-1)
    share = jnp.where(asks[:, None, None, :, None, None], share, 0.0).sum(3)
    share = share.max((2, 3)) if reading.together == "max" else share.sum((2, 3))
    share = jnp.where(there, jnp.where((pages == last)[:, None], jnp.inf, share), -1.0)
    wanted, index = jax.lax.top_k(share, count)
    return jnp.sort(jnp.where(wanted < 0, pages.size, index), axis=-1)


def take(tokens: Any, chosen: Chosen, size: int, kv_heads: int) -> Any:
    """A segment of the tokens of chosen pages alone; quantised ones are widened, others stay where they lie if kernels
    read them there.

    Codes that units share are taken for each of them. Pages from the number of all pages on hold no token.
    """
    starts = chosen.pages * size
    slots = (starts[..., None] + jnp.arange(size)).reshape(*starts.shape[:2], -1)

    def at(positions: Any, of_units: jax.Array) -> jax.Array:
        return jax.vmap(lambda own: positions_of(positions).at(own)[0])(of_units)

    def positions_of(row: Any) -> Any:
        return jax.tree.map(lambda x: x[None], row)

    position = jax.vmap(at)(tokens.positions, slots)
    where = PerHead(position, None, kv_heads)
    if isinstance(tokens.positions, Runs):
        where = OfPages(position, None, kv_heads, tokens.positions)
    k, v = (_of_pages(x, chosen.pages, starts, size) for x in (tokens.k, tokens.v))
    return dataclasses.replace(tokens, k=k, v=v, length=chosen.tokens, positions=where)


def _of_pages(stored: Any, chosen: jax.Array, starts: jax.Array, size: int) -> Any:
    """Pages of a storage, gathered where no kernel reads them where they lie; those that are none hold anything."""
    if hasattr(stored, "of_pages") and stored.page == size:
        return stored.of_pages(chosen)
    if isinstance(stored, jax.Array) and backend.choose() == "triton" and mesh_here() is None:
        return ChosenPages(stored, chosen, size)
    return gather_blocks(stored, starts, size)
