"""Votes of decoded queries for the tokens that they attended to, kept beside the tokens until the next choice."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.codec import Ends
from lowrank_kv_jax.method.votes import decoding_votes
from lowrank_kv_jax.segments import exact as exact_tokens
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
    tokens = state.store.tokens
    read = method.codec.logits(layout, bases.codec, state.store, q, place)
    where, slots = tokens.positions, jnp.arange(tokens.k.shape[2])
    there = (slots[None] < tokens.length[:, None])[:, None]
    seen = _seen(voter, where.position, there, positions, place.window)
    buffers = read.keys.shape[1]
    if where.owner is None:
        seen = jnp.repeat(seen, buffers // seen.shape[1], axis=1)
    else:
        owned = where.owned(slots, spec.q_heads)  # [B, 1, 1, N, S]
        seen = seen & owned.reshape(owned.shape[0], buffers, 1, -1, owned.shape[-1])
    far = votes(read.q, read.keys, seen=seen)
    far = far.reshape(*state.far_votes.shape[:2], -1, far.shape[-1]).sum(2)  # of the heads of a unit
    return dataclasses.replace(state, far_votes=state.far_votes + far)


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
