"""Room for one more basis: the two adjacent chunks that lose least by it share one from then on."""

import dataclasses

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.osp_chunks import ChunkedStore, Chunks
from lowrank_kv_jax.codecs.osp_sides import Side
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.chunk_bases import ChunkBases
from lowrank_kv_jax.storage.quantised import QuantisedTokens, read_tokens


def make_room(store: ChunkedStore, sides: tuple[Side, Side], page: int, rows: jax.Array) -> ChunkedStore:
    """The store with one basis less in the rows of `rows`, bool `[B]`, whose bases are all in use.

    Two adjacent chunks of each are merged: their basis is the principal one of both chunks' tokens as they are stored,
    and their coefficients are transported into it. What neither the old bases nor the new one hold is lost for good.
    Costs as much as reading the coefficients once, and happens at most once a chunk.
    """
    return jax.lax.cond(jnp.any(rows), lambda: _merged(store, sides, page, rows), lambda: store)


def _merged(store: ChunkedStore, sides: tuple[Side, Side], page: int, rows: jax.Array) -> ChunkedStore:
    chunks, tokens = store.chunks, store.tokens
    moments = [_moments(x, chunks, tokens.length, page) for x in (tokens.k, tokens.v)]
    rooms = (chunks.k_bases, chunks.v_bases)
    every = jnp.broadcast_to(jnp.arange(rooms[0].capacity), (len(rows), rooms[0].capacity))
    bases = [room.take(every) for room in rooms]
    first = jnp.argmin(sum(_losses(u, s) for u, s in zip(bases, moments, strict=True)), axis=1)
    made = [_merge_side(*given, first, rows) for given in zip(rooms, bases, moments, sides, strict=True)]
    moved = [_transported(x, moves, chunks.owner, first, tokens.length, page, rows)
             for x, (_, moves) in zip((tokens.k, tokens.v), made, strict=True)]
    owner = chunks.owner - (rows[:, None] & (chunks.owner > first[:, None]))
    chunks = dataclasses.replace(
        chunks, k_bases=made[0][0], v_bases=made[1][0], owner=owner, used=chunks.used - rows.astype(jnp.int32)
    )
    return ChunkedStore(dataclasses.replace(tokens, k=moved[0], v=moved[1]), chunks)


def _moments(stored, chunks: Chunks, lengths: jax.Array, page: int) -> jax.Array:
    """Second moments of the coefficients of each chunk, float32 `[B, C, J, R, R]`."""
    x = read_tokens(stored).astype(jnp.float32)
    x = jnp.where((jnp.arange(x.shape[2]) < lengths[:, None])[:, None, :, None], x, 0)
    x = x.reshape(*x.shape[:2], -1, page, x.shape[-1])
    of_pages = precise.einsum("bjpsr,bjpsq->bpjrq", x, x)
    hot = chunks.owner[:, None] == jnp.arange(chunks.k_bases.capacity)[:, None]
    return precise.einsum("bcp,bpjrq->bcjrq", hot.astype(jnp.float32), of_pages)


def _losses(bases: jax.Array, moments: jax.Array) -> jax.Array:
    """What each chunk and the next one lose in the better of their two bases, of the energy of all; `[B, C - 1]`.

    A bound on what they lose in their common principal basis. Means over heads.
    """
    across = precise.einsum("bcjwr,bcjwq->bcjrq", bases[:, :-1], bases[:, 1:])
    energy = jnp.trace(moments, axis1=-2, axis2=-1)
    in_next = energy[:, :-1] - precise.einsum("bcjrq,bcjrs,bcjsq->bcj", across, moments[:, :-1], across)
    in_last = energy[:, 1:] - precise.einsum("bcjrq,bcjqs,bcjrs->bcj", across, moments[:, 1:], across)
    total = jnp.sum(energy, axis=1, keepdims=True)
    return jnp.mean(jnp.minimum(in_next, in_last) / jnp.where(total > 0, total, 1), axis=2)


def _merge_side(
    room: ChunkBases, bases: jax.Array, moments: jax.Array, side: Side, first: jax.Array, rows: jax.Array
) -> tuple[ChunkBases, tuple[jax.Array, jax.Array]]:
    """The bases without one, and what takes the coefficients of both chunks to those in the new basis, `[B, J, R, R]`."""
    def of(x: jax.Array, number: jax.Array) -> jax.Array:
        return jax.vmap(lambda own, i: own[i])(x, number)

    pair = [(of(bases, first + i), of(moments, first + i)) for i in (0, 1)]
    first_part, second_part = (precise.einsum("bjwr,bjrq,bjxq->bjwx", u, s, u) for u, s in pair)
    new = side.joined(principal_subspace(side.moment(first_part + second_part), side.columns))
    room = room.without(first, rows).put(first, new, rows)
    stored = room.take(first[:, None])[:, 0]
    return room, (coded_tokens.change_of_basis(pair[0][0], stored), coded_tokens.change_of_basis(pair[1][0], stored))


def _transported(stored, moves, owner: jax.Array, first: jax.Array, lengths: jax.Array, page: int, rows: jax.Array):
    """Coefficients of the chunks `first` and the one behind it, in the basis that they share now."""
    old = read_tokens(stored)
    x = old.astype(jnp.float32)
    by_page = x.reshape(*x.shape[:2], -1, page, x.shape[-1])
    for i, move in enumerate(moves):
        changed = precise.einsum("bjpsr,bjrq->bjpsq", by_page, move)
        own = (owner == first[:, None] + i) & rows[:, None]
        by_page = jnp.where(own[:, None, :, None, None], changed, by_page)
    touched = jnp.repeat((owner - first[:, None] < 2) & (owner >= first[:, None]) & rows[:, None], page, axis=1)
    x = by_page.reshape(x.shape)
    if not isinstance(stored, QuantisedTokens):
        new = jnp.where(touched[:, None, :, None], narrow(x, stored.dtype), old.astype(stored.dtype))
        return stored.write_block(0, new) if hasattr(stored, "write_block") else new
    valid = jnp.arange(x.shape[2]) < lengths[:, None]
    return stored.write_block(0, x, valid, jnp.any(touched.reshape(len(rows), -1, stored.tile.tokens), axis=2))
