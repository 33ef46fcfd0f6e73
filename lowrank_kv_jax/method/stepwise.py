"""Algorithm 1 of MomentKV: at every decoded token one token leaves the recent window, and each full head evicts one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import candidates as pool
from lowrank_kv_jax.method import voting
from lowrank_kv_jax.method.choice import head_counts
from lowrank_kv_jax.method.chosen import sum_up
from lowrank_kv_jax.method.codec import codes_of
from lowrank_kv_jax.method.in_order import oldest
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.bits import Bits, bits_of
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.summaries.residuals import residual_norms


def evict_one(method: Any, layout, bases, state, taps: Taps, counts: jax.Array):
    """The state after a token, of `taps`, was appended to the rows of `counts` 1; the others stay as they are.

    alpha is the softmax of the current query over the retained tokens (and its sink, where the model has one), summed
    over the query heads of a kv head.
    """
    if state.store is None:
        return state
    active = counts > 0
    moved = _evict(method, layout, bases, state, taps)
    return jax.tree.map(lambda new, old: jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old), moved, state)


def _evict(method, layout, bases, state, taps):
    rule, spec, codec = method.selection, layout.spec, method.codec
    ends, room, heads = method.ends_of(layout, bases), method.room(layout, bases), spec.kv_heads
    leaving = oldest(layout, state.ends[0], ends.first, 1)
    state, count, votes = voting.flush(state, ends, 1)
    valid = jnp.broadcast_to((count > 0)[:, None, None], votes.shape)
    position = jnp.broadcast_to(leaving.positions[:, None], valid.shape).astype(jnp.int32)
    fresh = pool.arrange(room, position, votes, valid)
    found = pool.join(pool.stored(state), fresh)
    new = codec.encode(layout, bases.codec, state.store, (leaving,))
    k, v = (pool.joined_codes(old, x, room) for old, x in zip(codes_of(state.store), new, strict=True))
    where = PerHead(found.position, found.owner, heads)
    exact_k, exact_v = codec.decode(layout, bases.codec, state.store, k, v, where, 0)
    if room.packed:
        exact_k, exact_v = (pool.owned_rows(x, found.owner) for x in (exact_k, exact_v))
    score = _alpha(layout, state.ends[0], found, exact_k, taps)
    if rule.statistics:
        score = score * residual_norms(state.gone[0], exact_k, exact_v, found.owner, spec.scale)
    if not room.packed:
        score = score.reshape(*found.valid.shape[:2], -1, score.shape[-1]).sum(2)
    kept = _all_but_the_worst(found, score, heads, room.tokens)
    state = sum_up(method, layout, bases, state, room, found, kept, k, v, layout.block)
    return _put(state, fresh, kept, [x[:, :, -fresh.valid.shape[2] :] for x in (k, v)])


def _all_but_the_worst(found: pool.Candidates, score: jax.Array, heads: int, tokens: int) -> jax.Array:
    """Bool `[B, J, S]`: of each full buffer every head loses the candidate of the lowest score."""
    score = jnp.where(found.valid, score, jnp.inf)
    owner = found.owner if found.owner is not None else jnp.zeros_like(found.position, jnp.int8)
    own_heads = heads if found.owner is not None else 1
    mine = owner[:, :, None] == jnp.arange(own_heads)[:, None]  # [B, J, heads of the buffer, S]
    worst = jnp.argmin(jnp.where(mine, score[:, :, None], jnp.inf), axis=-1)
    held_by = head_counts(found.valid, owner, own_heads)  # [B, J, heads of the buffer]
    # a packed buffer is full when its heads together are over the budget; each then loses one
    full = held_by.sum(-1, keepdims=True) > own_heads * tokens
    gone = jnp.any((jnp.arange(score.shape[-1]) == worst[..., None]) & full[..., None], axis=2) & found.valid
    return found.valid & ~gone


def _alpha(layout, exact, found: pool.Candidates, keys: jax.Array, taps: Taps) -> jax.Array:
    """Attention of the newest query over everything retained, `[B, K or 1, S]` of the candidates, summed over query
    heads."""
    spec, groups, q = layout.spec, keys.shape[1], taps.q
    slots, newest = jnp.arange(keys.shape[2]), exact_tokens.newest(exact)
    near = exact_tokens.attend(exact, q, newest[:, None], **spec.logits, window=layout.window)
    near = with_sink(near, taps.sink_logits)
    query = q[:, 0].reshape(q.shape[0], groups, -1, q.shape[-1])
    logits = jnp.einsum("bjgd,bjsd->bjgs", query, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    seen = pool.reached(found, layout.window, newest - 1).valid
    there = jnp.repeat(seen, groups // seen.shape[1], axis=1)[:, :, None]
    if found.owner is not None:
        there = there & PerHead(found.position, found.owner, spec.kv_heads).owned(slots, spec.q_heads)[:, :, 0]
    logits = jnp.where(there, logits_of(logits, **spec.logits), -jnp.inf)
    near_lse = near.lse[:, 0].reshape(q.shape[0], groups, -1)
    lse = jnp.logaddexp(near_lse, jax.nn.logsumexp(logits, axis=-1))
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.where(there, jnp.exp(logits - lse[..., None]), 0.0).sum(2)


def _put(state, fresh: pool.Candidates, kept: jax.Array, codes: list[jax.Array]):
    """Put the kept ones of the fresh tokens into slots that were evicted or still free."""
    tokens, news = state.store.tokens, fresh.valid.shape[2]
    size = tokens.k.shape[2]
    stays, comes = kept[:, :, :-news], kept[:, :, -news:]
    hole = pool.compact(~stays, news)
    nth = jnp.cumsum(comes, axis=-1) - 1
    at = jnp.where(comes, jnp.take_along_axis(hole, jnp.maximum(nth, 0), axis=2), size)

    def put(buffer, new):
        if isinstance(buffer, Bits):
            return buffer.moved(put, bits_of(new))
        row = jax.vmap(jax.vmap(lambda b, n, i: b.at[i].set(n.astype(b.dtype), mode="drop")))
        return row(buffer, new, at)

    where = tokens.positions
    owner = None if where.owner is None else put(where.owner, fresh.owner)
    positions = PerHead(put(where.position, fresh.position), owner, where.kv_heads)
    tokens = dataclasses.replace(
        tokens, k=put(tokens.k, codes[0]), v=put(tokens.v, codes[1]), length=kept.sum(-1, dtype=jnp.int32)[:, 0],
        positions=positions,
    )
    far = None if state.far_votes is None else put(state.far_votes, fresh.votes)
    return dataclasses.replace(state, store=dataclasses.replace(state.store, tokens=tokens), far_votes=far)
