"""Votes of decoded queries for the tokens that they attended to, kept beside the tokens until the next choice."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method.codec import Ends
from lowrank_kv_jax.method.votes import QUERIES, decoding_votes, seen_before
from lowrank_kv_jax.pallas_kernels.votes import add_votes
from lowrank_kv_jax.pallas_kernels.votes.asked import Asked
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.backend import on_gpu
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.over_tokens import on_each, own_segments
from lowrank_kv_jax.storage.state import take_tokens


def of_prompt(exact: exact_tokens.Exact, votes: jax.Array) -> jax.Array:
    """Scores `[B, K, E]` of the exact tokens from those of the prompt `[B, K, S]`."""
    slots = jnp.arange(exact.k.shape[2])
    at = jnp.clip(exact.positions.at(slots), 0, votes.shape[2] - 1)
    there = slots[None] < exact.length[:, None]
    return jnp.where(there[:, None], jnp.take_along_axis(votes, at[:, None], axis=2), 0.0)


def observe(method: Any, layout, bases, state, q: jax.Array, lse: jax.Array, positions: jax.Array, place):
    """The state after a layer's queries `[B, T, N, D]`, whose total log-sum-exp is `lse`, have voted."""
    there = positions <= exact_tokens.newest(state.ends[place.held])[:, None]  # rows may be padded, or have ended
    voters = Voters(q, lse, positions, there)

    def on_xla() -> tuple[jax.Array, ...]:
        near, far = _for_held(method, layout, bases, state, voters, place)
        return (state.near_votes + near, *(() if far is None else (state.far_votes + far,)))

    of_vote, of_counted = (_definer(type(method.selection), name) for name in ("vote", "counted"))
    if of_vote is of_counted and layout.spec.logit_cap is None:
        votes = _by_kernel(method, layout, bases, state, voters, place, on_xla)
    else:
        votes = on_xla()
    near, far = votes if len(votes) == 2 else (*votes, state.far_votes)
    return dataclasses.replace(state, near_votes=near, far_votes=far)


def _by_kernel(method, layout, bases, state, voters, place, on_xla: Callable[[], Any]) -> tuple[jax.Array, ...]:
    """Votes for the exact tokens, and for the stored ones if there is a store, with those of `voters`."""

    def asked() -> Iterator[Asked]:
        exact, store = state.ends[place.held], state.store
        yield Asked(state.near_votes, exact_tokens.asked(exact, voters.q, voters.positions, place.window))
        if store is not None:
            q, keys = method.codec.logits(layout, bases.codec, store, voters.q, place)
            tokens = CachedTokens(keys, keys, store.tokens.length, store.tokens.positions)
            yield Asked(state.far_votes, Beside(q, tokens, voters.positions, False, place.window))

    lse = jnp.where(voters.there[..., None], voters.lse, jnp.inf)
    before = seen_before(voters.positions, place.window)
    least = 1.0 / (before + 1) if method.selection.counted else None
    return add_votes(asked, lse, scale=layout.spec.scale, least=least, reference=on_xla)


def _definer(rule: type, name: str) -> type:
    """The class whose method or attribute it is."""
    return next(cls for cls in rule.__mro__ if name in vars(cls))


class Voters(NamedTuple):
    """Queries that vote: q `[B, T, N, D]`, their total log-sum-exp float32 `[B, T, N]`, positions int32 `[B, T]`, and
    bool `[B, T]` which of them there are."""

    q: jax.Array
    lse: jax.Array
    positions: jax.Array
    there: jax.Array

    def votes(self, method, layout, place, keys: Any, position, held, owned=None, causal: bool = True) -> jax.Array:
        """float32 `[B, J, S]` for keys `[B, J, S, D]`.

        Args:
            position: int32 `[B, U, S]` of the keys, of which J / U buffers share it.
            held: bool `[B, U, S]`, which of them there are.
            owned: bool `[B, 1, 1, N, S]`, which query heads see which of packed keys; None: each those of its buffer.
            causal: whether some keys may lie behind a query.
        """
        key, query, buffers = position[:, :, None, None], self.positions[:, None, :, None, None], keys.shape[1]
        seen = self.there[:, None, :, None, None] & held[:, :, None, None]
        if causal:
            seen = seen & (key <= query)
        if place.window is not None:
            seen = seen & (key > query - place.window)
        if owned is not None:
            seen = seen & owned.reshape(owned.shape[0], buffers, 1, -1, owned.shape[-1])
        elif 1 < seen.shape[1] < buffers:
            seen = jnp.repeat(seen, buffers // seen.shape[1], axis=1)
        vote, logits = method.selection.vote, layout.spec.logits
        return decoding_votes(self.q, keys, self.lse, vote, seen_before(self.positions, place.window), seen, **logits)

    def in_blocks(self, votes: Callable[["Voters"], jax.Array]) -> jax.Array:
        """The sum of `votes` of `QUERIES` of them at a time."""
        count = self.lse.shape[1]
        if count <= QUERIES:
            return votes(self)
        padded = Voters(*(jnp.pad(x, ((0, 0), (0, -count % QUERIES), *((0, 0),) * (x.ndim - 2))) for x in self))

        def part(i):
            return Voters(*(jax.lax.dynamic_slice_in_dim(x, i * QUERIES, QUERIES, axis=1) for x in padded))

        nothing = jnp.zeros(jax.eval_shape(lambda: votes(part(0))).shape, jnp.float32)
        return jax.lax.fori_loop(0, -(-count // QUERIES), lambda i, total: total + votes(part(i)), nothing)


def _for_held(method, layout, bases, state, voters: Voters, place) -> tuple[jax.Array, jax.Array | None]:
    """Votes for the exact tokens `[B, K, E]`, and `[B, U, S]` for the stored ones, if there is a store."""
    apart = voters
    if on_gpu() and state.store is not None:  # of two products of one factor XLA makes one, of copies of all keys
        apart = voters._replace(q=jax.lax.optimization_barrier(voters.q))
    near = apart.in_blocks(lambda part: _for_exact(method, layout, state.ends[place.held], part, place))
    if state.store is None:
        return near, None

    def of_slots(number: jax.Array, store: Any, bases: Any, voters: Voters) -> jax.Array:
        return _for_stored(method, layout, bases, own_segments(number, store), voters, place)

    return near, on_each(of_slots, state.store, bases, voters, out="slots")


def _for_exact(method, layout, exact: exact_tokens.Exact, voters: Voters, place) -> jax.Array:
    slots = jnp.arange(exact.k.shape[2])
    position, held = exact.positions.at(slots), slots[None] < exact.length[:, None]
    return voters.votes(method, layout, place, exact.k, position[:, None], held[:, None])


def _for_stored(method, layout, bases, store, voters: Voters, place) -> jax.Array:
    tokens = store.tokens
    where, slots = tokens.positions, jnp.arange(tokens.k.shape[2])
    held, owned = (slots[None] < tokens.length[:, None])[:, None], where.owned(slots, layout.spec.q_heads)
    q, keys = method.codec.logits(layout, bases.codec, store, voters.q, place)  # of all voters: keys may be rebuilt

    def votes(part: Voters) -> jax.Array:
        return part.votes(method, layout, place, keys, where.position, held, owned, causal=False)

    of_buffers = voters._replace(q=q).in_blocks(votes)
    return of_buffers.reshape(*where.position.shape[:2], -1, of_buffers.shape[-1]).sum(2)


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
    rule, size = method.selection, taps.k.shape[1]
    mine = jnp.arange(size)[None] < counts[:, None]
    most = size if rule.voters is None else min(rule.voters, size)
    index = jnp.maximum(counts - most, 0)[:, None] + jnp.arange(most)
    there = index < counts[:, None]
    q, lse, asked = (jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
                     for x in (taps.q, lse, positions))
    voters, own = Voters(q, lse, asked, there), taps.k.swapaxes(1, 2)
    near, far = _for_held(method, layout, bases, state, voters, place)
    fresh = voters.in_blocks(lambda part: part.votes(method, layout, place, own, positions[:, None], mine[:, None]))
    return Seen(near, jnp.zeros(()) if far is None else far, fresh)


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
