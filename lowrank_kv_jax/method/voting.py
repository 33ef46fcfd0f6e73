"""Votes of decoded queries for the tokens that they attended to, kept beside the tokens until the next choice."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method.codec import Ends
from lowrank_kv_jax.method.votes import QUERIES, decoding_votes
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.over_tokens import on_each, own_segments
from lowrank_kv_jax.storage.state import take_tokens


def of_prompt(empty: jax.Array, exact: exact_tokens.Exact, votes: jax.Array) -> jax.Array:
    """Scores `[B, K, E]` of the exact tokens from those of the prompt `[B, K, S]`."""
    slots = jnp.arange(empty.shape[2])
    at = jnp.clip(exact.positions.at(slots), 0, votes.shape[2] - 1)
    there = slots[None] < exact.length[:, None]
    return jnp.where(there[:, None], jnp.take_along_axis(votes, at[:, None], axis=2), 0.0)


def observe(method: Any, layout, bases, state, q: jax.Array, lse: jax.Array, positions: jax.Array, place):
    """The state after a layer's queries `[B, T, N, D]`, whose total log-sum-exp is `lse`, have voted."""
    rule, spec, exact = method.selection, layout.spec, state.ends[place.index]
    slots = jnp.arange(exact.k.shape[2])
    at = exact.positions.at(slots)
    there = slots[None] < exact.length[:, None]
    last = jnp.max(jnp.where(there, at, -1), axis=1)
    voter = (positions <= last[:, None])[:, None, :, None, None]  # rows may be padded, or have ended
    votes = functools.partial(decoding_votes, lse=lse, **spec.logits, vote=rule.vote, positions=positions)
    seen = _seen(voter, at[:, None], there[:, None], positions, place.window)
    state = dataclasses.replace(state, near_votes=state.near_votes + votes(q, exact.k, seen=seen))
    if state.store is None:
        return state

    def of_slots(number: jax.Array, store: Any, bases: Any, q, lse, voter, positions) -> jax.Array:
        stored = _Stored.of(method, layout, bases, own_segments(number, store), q, place)
        votes = functools.partial(decoding_votes, lse=lse, **spec.logits, vote=rule.vote, positions=positions)
        return stored.votes(votes, stored.q, voter, positions, place.window)

    far = on_each(of_slots, state.store, bases, q, lse, voter, positions, out="slots")
    return dataclasses.replace(state, far_votes=state.far_votes + far)


class _Stored(NamedTuple):
    """Stored tokens that are voted for: queries `[B, T, N, R]` and keys `[B, J, S, R]` of their logits, their
    positions, and bool `[B, 1, 1, N, S]` which query heads see which of packed ones."""

    q: jax.Array
    keys: Any
    where: Any
    there: jax.Array
    owned: jax.Array | None

    @classmethod
    def of(cls, method, layout, bases, store, q: jax.Array, place) -> "_Stored":
        tokens = store.tokens
        read = method.codec.logits(layout, bases.codec, store, q, place)
        slots = jnp.arange(tokens.k.shape[2])
        there = (slots[None] < tokens.length[:, None])[:, None]
        return cls(*read, tokens.positions, there, tokens.positions.owned(slots, layout.spec.q_heads))

    def votes(self, votes: Any, q: jax.Array, voter: jax.Array, positions: jax.Array, window: int | None) -> jax.Array:
        """`[B, U, S]` of each unit, from some of the queries."""
        seen, buffers = _seen(voter, self.where.position, self.there, positions, window), self.keys.shape[1]
        if self.owned is None:
            seen = jnp.repeat(seen, buffers // seen.shape[1], axis=1)
        else:
            seen = seen & self.owned.reshape(self.owned.shape[0], buffers, 1, -1, self.owned.shape[-1])
        far = votes(q, self.keys, seen=seen)
        return far.reshape(*self.where.position.shape[:2], -1, far.shape[-1]).sum(2)


class Seen(NamedTuple):
    """Votes of a chunk's queries, float32: `near` `[B, K, E]` for the exact tokens, `far` `[B, U, S]` for those that are
    stored, `fresh` `[B, K, T]` for the chunk's own."""

    near: jax.Array
    far: jax.Array
    fresh: jax.Array


def alone(state: Any, scores: jax.Array) -> Seen:
    """Scores `[B, K, T]` of a chunk's own tokens, which say nothing of others."""
    near, far = (jnp.zeros_like(x) if x is not None else jnp.zeros(()) for x in (state.near_votes, state.far_votes))
    return Seen(near, far, scores)


def share_that_stays(rule: Any, counts: jax.Array) -> jax.Array:
    """Of the votes so far, float32 `[B, 1, 1]`, once the last of `counts` `[B]` more queries vote.

    Where only the last `voters` of a prompt vote, those of a whole chunk replace the earlier ones, those of a shorter one
    take their part of the window.
    """
    if rule.voters is None:
        return jnp.ones((len(counts), 1, 1), jnp.float32)
    return jnp.clip(1 - counts / max(rule.voters, 1), 0, 1)[:, None, None].astype(jnp.float32)


def of_chunk(
    method: Any, layout, bases, state, taps: Taps, lse: jax.Array, positions: jax.Array, counts: jax.Array, place
) -> Seen:
    """What the queries of a chunk, whose total log-sum-exp is `lse` `[B, T, N]`, vote; block by block.

    Args:
        taps: of one layer, T tokens at `positions` `[B, T]`.
        counts: int32 `[B]`, how many of the T there are.
    """
    rule, spec, exact, size = method.selection, layout.spec, state.ends[place.index], taps.k.shape[1]
    slots = jnp.arange(exact.k.shape[2])
    at, there = exact.positions.at(slots)[:, None], (slots[None] < exact.length[:, None])[:, None]
    mine, own = jnp.arange(size)[None] < counts[:, None], taps.k.swapaxes(1, 2)
    voters = size if rule.voters is None else min(rule.voters, size)
    width = min(voters, QUERIES)
    blocks = -(-voters // width)
    index = jnp.maximum(counts - voters, 0)[:, None] + jnp.arange(blocks * width)
    votes_now = (index < counts[:, None]) & (jnp.arange(blocks * width) < voters)
    index = jnp.minimum(index, size - 1)
    q, lse = (jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1) for x in (taps.q, lse))
    asked = jnp.take_along_axis(positions, index, axis=1)
    stored = None if state.store is None else _Stored.of(method, layout, bases, state.store, q, place)

    def block(i, total):
        def part(x):
            return jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1)

        voter, query = part(votes_now)[:, None, :, None, None], part(asked)
        vote = functools.partial(decoding_votes, lse=part(lse), **spec.logits, vote=rule.vote, positions=query)
        near = vote(part(q), exact.k, seen=_seen(voter, at, there, query, place.window))
        fresh = vote(part(q), own, seen=_seen(voter, positions[:, None], mine[:, None], query, place.window))
        far = 0.0 if stored is None else stored.votes(vote, part(stored.q), voter, query, place.window)
        return Seen(total.near + near, total.far + far, total.fresh + fresh)

    none = Seen(*(jnp.zeros(shape, jnp.float32) for shape in (
        (layout.batch, spec.kv_heads, len(slots)), () if stored is None else stored.where.position.shape,
        (layout.batch, spec.kv_heads, size))))
    return jax.lax.fori_loop(0, blocks, block, none)


def flush(state, ends: Ends, most: int):
    """Take up to `most` tokens out of the recent window; the state, how many, and their votes `[B, K, most]`."""
    before, sinks = state.ends[0].length, ends.first
    flushed = [exact_tokens.flush(part, sinks, ends.stay, most) for part in state.ends]
    counts = flushed[0][1].counts
    state = dataclasses.replace(state, ends=tuple(part for part, _ in flushed))
    near = state.near_votes
    if near is None:
        return state, counts, jnp.zeros((*state.ends[0].k.shape[:2], most), jnp.float32)
    votes = near[:, :, sinks : sinks + most]
    tail = take_tokens(near[..., None], sinks + counts, near.shape[2] - sinks)[..., 0]
    there = jnp.arange(tail.shape[2]) + sinks < (before - counts)[:, None, None]
    near = near.at[:, :, sinks:].set(jnp.where(there, tail, 0.0))
    return dataclasses.replace(state, near_votes=near), counts, votes


def _seen(voter, position, there, q_positions, window):
    """Which tokens a voter sees: bool `[B, J, T, 1, S]`; position, there `[B, J, S]`."""
    key, query = position[:, :, None, None], q_positions[:, None, :, None, None]
    seen = voter & there[:, :, None, None] & (key <= query)
    return seen if window is None else seen & (key > query - window)
