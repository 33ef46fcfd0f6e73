"""Tokens among which a selection chooses, and what it picked.

Votes, positions and validity are those of units: J buffers, one a unit, or one buffer (J = 1) in which the tokens of all
heads lie packed, head after head, each slot with its owner.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method.budget import Room
from lowrank_kv_jax.method.choice import compact as compact
from lowrank_kv_jax.method.choice import ranks
from lowrank_kv_jax.method.choice import take_slots as take_slots
from lowrank_kv_jax.method.head_budgets import HeadShares, head_budgets
from lowrank_kv_jax.segments.coded import owned_rows as owned_rows
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.positions import PerHead, owner_dtype


class Candidates(NamedTuple):
    """position int32, votes float32, valid bool `[B, J, S]`; owner `[B, 1, S]` of `owner_dtype`, or None."""

    position: jax.Array
    votes: jax.Array
    valid: jax.Array
    owner: jax.Array | None


class Picked(NamedTuple):
    """Candidates that stay: their slots int32 `[B, J, M]`, how many `[B]`, and whose they are."""

    slots: jax.Array
    length: jax.Array
    found: Candidates

    @classmethod
    def of(cls, found: Candidates, kept: jax.Array, size: int, heads: int) -> "Picked":
        """The first `size` of `kept` `[B, J, S]` in order; packed ones head after head."""
        length = jnp.minimum(kept.sum(-1, dtype=jnp.int32)[:, 0], size)
        if found.owner is None:
            return cls(compact(kept, size), length, found)
        mine = (kept & (found.owner == jnp.arange(heads)[:, None]))  # [B, K, S]
        counts = mine.sum(-1, dtype=jnp.int32)
        first = jnp.cumsum(counts, axis=1) - counts
        nth = first[:, :, None] + jnp.cumsum(mine, axis=-1, dtype=jnp.int32) - 1
        target = jnp.where(kept[:, 0], jnp.sum(jnp.where(mine, nth, 0), axis=1), size)
        source = jnp.arange(kept.shape[-1], dtype=jnp.int32)
        slots = jax.vmap(lambda at: jnp.zeros((size,), jnp.int32).at[at].set(source, mode="drop"))(target)
        return cls(slots[:, None], length, found)

    def take(self, x: jax.Array) -> jax.Array:
        """`x` `[B, J, S, ...]` of the picked ones, `[B, J, M, ...]`."""
        return take_slots(x, self.slots)

    def positions(self, heads: int) -> PerHead:
        owner = None if self.found.owner is None else self.take(self.found.owner)
        return PerHead(self.take(self.found.position), owner, heads)


def pack(x: jax.Array) -> jax.Array:
    """`[B, K, S, ...]` of every head, head after head: `[B, 1, K * S, ...]`."""
    return x.reshape(x.shape[0], 1, x.shape[1] * x.shape[2], *x.shape[3:])


def arrange(room: Room, position: jax.Array, votes: jax.Array, valid: jax.Array) -> Candidates:
    """Candidates in the buffers of `room`, from `[B, K, S]` of each head; votes of a unit are those of its heads."""
    if room.packed:
        owner = jnp.broadcast_to(jnp.arange(votes.shape[1], dtype=owner_dtype(votes.shape[1]))[:, None], votes.shape)
        return Candidates(pack(position), pack(votes), pack(valid), pack(owner))
    each = votes.shape[1] // room.buffers
    votes = votes.reshape(votes.shape[0], room.buffers, each, -1).sum(2) if each > 1 else votes
    return Candidates(position[:, ::each], votes, valid[:, ::each], None)


def reached(found: Candidates, window: int | None, newest: jax.Array) -> Candidates:
    """The candidates without those that no later query sees.

    Args:
        window: sliding window of the layers.
        newest: int32 `[B]`, position of the last token so far.
    """
    if window is None:
        return found
    return found._replace(valid=found.valid & (found.position > newest[:, None, None] + 1 - window))


def stored(state: Any) -> Candidates:
    """The stored tokens as candidates."""
    tokens = state.store.tokens
    where = tokens.positions
    valid = jnp.arange(where.position.shape[2])[None, None] < tokens.length[:, None, None]
    votes = state.far_votes if state.far_votes is not None else jnp.zeros(where.position.shape, jnp.float32)
    return Candidates(where.position, votes, jnp.broadcast_to(valid, where.position.shape), where.owner)


def join(a: Candidates, b: Candidates) -> Candidates:
    """The candidates of both, those of `b` last."""
    pairs = zip(a, b, strict=True)
    return Candidates(*(None if x is None else jnp.concatenate([x, y.astype(x.dtype)], axis=2) for x, y in pairs))


def joined_codes(old: jax.Array, new: jax.Array, room: Room) -> jax.Array:
    """Stored codes `[B, J, S, R]`, and behind them new ones `[B, U, T, R]`."""
    return jnp.concatenate([old, narrow(pack(new) if room.packed else new, old.dtype)], axis=2)


def best(
    found: Candidates, score: jax.Array, tokens: int, heads: int, shares: HeadShares, share_by: jax.Array
) -> jax.Array:
    """Which candidates stay, bool `[B, J, S]`: `tokens` of each unit, or of packed heads as many as they are given.

    Args:
        share_by: the scores by which heads share, `[B, J, S]`; read of packed heads.
    """
    score, share_by = (jnp.where(found.valid, x, -jnp.inf) for x in (score, share_by))
    if found.owner is None:
        return found.valid & (ranks(score) < tokens)
    budgets = head_budgets(share_by[:, 0], found.owner[:, 0], heads, tokens, shares)
    most = jnp.take_along_axis(budgets[:, None], found.owner.astype(jnp.int32), axis=2)
    return found.valid & (ranks(score[:, 0], found.owner[:, 0], heads)[:, None] < most)


def of_heads(chosen: jax.Array, size: int, heads: int, packed: bool) -> jax.Array:
    """Which of `size` tokens each kv head chose, bool `[B, K, S]`, of `chosen` as `arrange` laid them out."""
    if packed:
        return chosen.reshape(chosen.shape[0], heads, size)
    return jnp.repeat(chosen, heads // chosen.shape[1], axis=1)


def of_owners(chosen: jax.Array, owner: jax.Array | None, heads: int) -> jax.Array:
    """Which of the `chosen` slots `[B, J, S]` belong to each kv head: bool `[B, K, S]`."""
    if owner is None:
        return jnp.repeat(chosen, heads // chosen.shape[1], axis=1)
    return chosen & (owner == jnp.arange(heads)[:, None])
