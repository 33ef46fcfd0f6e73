"""Behind a selection: tokens between the ends are candidates, chosen from the prompt and anew at every refresh."""

import dataclasses

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method import candidates as pool
from lowrank_kv_jax.method import voting
from lowrank_kv_jax.method.budget import Room
from lowrank_kv_jax.method.codec import Tokens, codes_of, hold
from lowrank_kv_jax.method.head_budgets import HeadShares
from lowrank_kv_jax.method.in_order import oldest
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.held import as_array
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.state import map_leaves
from lowrank_kv_jax.summaries import moments as moment_summary
from lowrank_kv_jax.summaries.residuals import residual_norms


def compress(machine, layout, bases, state, taps, lengths):
    rule, ends = machine.selection, machine.ends_of(layout, bases)
    exact = tuple(
        exact_tokens.hold_prompt(part, tap.k, tap.v, lengths, ends.sinks, ends.recent)
        for part, tap in zip(state.ends, taps, strict=True)
    )
    state = dataclasses.replace(state, ends=exact)
    scores = [rule.prompt_scores(layout, tap, lengths) for tap in taps]
    votes = sum(scores[1:], scores[0])
    slots = jnp.arange(votes.shape[2], dtype=jnp.int32)
    middle = (slots >= ends.sinks) & (slots < lengths[:, None] - ends.recent)
    if state.near_votes is not None:
        state = dataclasses.replace(state, near_votes=voting.of_prompt(exact[0], votes))
    stays = jnp.zeros(votes.shape, bool)
    if state.store is not None:
        state, stays = _select_prompt(machine, layout, bases, state, taps, lengths, votes, middle)
    gone = tuple(
        moment_summary.update(sums, *_by_head(tap.k, tap.v), middle[:, None] & ~stays)
        for sums, tap in zip(state.gone, taps, strict=False)
    )
    return dataclasses.replace(state, gone=gone)


def _select_prompt(machine, layout, bases, state, taps, lengths, votes, middle):
    """The state with the prompt's selected tokens coded, and which of them each head keeps, bool `[B, K, S]`."""
    room, heads, codec = machine.room(layout, bases), layout.spec.kv_heads, machine.codec
    size = votes.shape[2]
    position = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), votes.shape)
    found = pool.arrange(room, position, votes, jnp.broadcast_to(middle[:, None], votes.shape))
    score = found.votes
    if machine.selection.statistics:
        exact = [tuple(narrow(x, layout.dtype) for x in _by_head(tap.k, tap.v)) for tap in taps]
        sums = state.gone
        if machine.selection.prefill == "informed":
            weight = jnp.broadcast_to(middle[:, None], votes.shape)
            sums = [moment_summary.update(s, k, v, weight) for s, (k, v) in zip(sums, exact, strict=True)]
        pairs = [(pool.pack(k), pool.pack(v)) if room.packed else (k, v) for k, v in exact]
        score = _informed(layout, room, score, sums, pairs, found.owner)
    found = pool.reached(found, layout.window, lengths - 1)
    kept = _best(machine, layout, bases, room, found, score)
    picked = pool.Picked.of(found, kept, state.store.tokens.k.shape[2], heads)
    stays = pool.of_heads(kept, size, heads, packed=room.packed)
    weight = jnp.any(stays, axis=1).astype(jnp.float32)
    store = codec.learn(layout, bases.codec, state.store, taps, lengths, weight)
    at = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (layout.batch, size))
    codes = codec.encode(layout, bases.codec, store, tuple(Tokens(tap.k, tap.k_pre, tap.v, at) for tap in taps))
    codes = [picked.take(pool.pack(x) if room.packed else x) for x in codes]
    store = hold(store, *codes, picked.length, picked.positions(heads))
    far = None if state.far_votes is None else picked.take(found.votes)
    return dataclasses.replace(state, store=store, far_votes=far), stays


def refresh(machine, layout, bases, state):
    ends, most = machine.ends_of(layout, bases), layout.block
    tokens = tuple(oldest(layout, part, ends.first, most) for part in state.ends)
    state, counts, votes = voting.flush(state, ends, most)
    return admit(machine, layout, bases, state, tokens, counts, votes)


def admit(
    machine, layout, bases, state, tokens: tuple[Tokens, ...], counts, votes, *, chunk: bool = False,
    of_prompt: bool = False,
):
    """The state once it has chosen among its stored tokens and those that have left the exact ends.

    Where later tokens all stay (`decoding=code`) they are appended, O(T); heads that lie packed are laid anew.

    Args:
        tokens: of each layer, `[B, T, ...]`.
        counts: int32 `[B]`, how many of the first there are.
        votes: float32 `[B, K, T]`, theirs.
        chunk: whether they are of a chunk, whose last queries chose, and not of a block of steps.
        of_prompt: whether that chunk is the prompt's.
    """
    codec, spec, most = machine.codec, layout.spec, votes.shape[2]
    there = jnp.arange(most)[None] < counts[:, None]
    valid = jnp.broadcast_to(there[:, None], votes.shape)
    if state.store is None:
        gone = tuple(
            moment_summary.update(sums, *_by_head(new.k, new.v), valid)
            for sums, new in zip(state.gone, tokens, strict=False)
        )
        return dataclasses.replace(state, gone=gone)
    move = codec.relearn if of_prompt else codec.adapt
    store = move(layout, bases.codec, state.store, tokens, there.astype(jnp.float32))
    codes = codec.encode(layout, bases.codec, store, tokens)
    state, room = dataclasses.replace(state, store=store), machine.room(layout, bases)
    position = jnp.broadcast_to(tokens[0].positions[:, None], votes.shape).astype(jnp.int32)
    fresh = pool.arrange(room, position, votes, valid)
    if machine.selection.decoding != "code" or of_prompt:
        return _choose_anew(machine, layout, bases, state, fresh, codes, counts, chunk, of_prompt)
    if room.packed:
        found, k, v = _with_stored(state, room, fresh, codes)
        store = _laid_out(store, pool.Picked.of(found, found.valid, store.tokens.k.shape[2], spec.kv_heads), k, v, counts)
    else:
        store = dataclasses.replace(store, tokens=coded_tokens.append(store.tokens, *codes, counts, fresh.position))
    return dataclasses.replace(state, store=store)


def _choose_anew(machine, layout, bases, state, fresh: pool.Candidates, codes, counts, chunk: bool, of_prompt: bool):
    """The state with the best of what is stored and of the `fresh` candidates, whose codes are `[B, U, T, R]`."""
    rule, codec, spec, store = machine.selection, machine.codec, layout.spec, state.store
    room = machine.room(layout, bases)
    found, k, v = _with_stored(state, room, fresh, codes)
    score = found.votes
    if chunk and rule.neighbours is not None:
        score = rule.neighbours.shared(score, found.position, found.owner, found.valid)
    if rule.statistics:
        where, sums = PerHead(found.position, found.owner, spec.kv_heads), state.gone
        pairs = [codec.decode(layout, bases.codec, store, k, v, where, i) for i in range(len(sums))]
        if of_prompt and rule.prefill == "informed":
            weight = pool.of_owners(found.valid, found.owner, spec.kv_heads)
            sums = [moment_summary.update(s, *pair, weight) for s, pair in zip(sums, pairs, strict=True)]
        score = _informed(layout, room, score, sums, pairs, found.owner)
    waits = (counts == 0)[:, None, None]  # what such a row holds stays, though budgets of heads were rounded
    there = pool.reached(found, layout.window, _newest(state, fresh))
    kept = jnp.where(waits, found.valid, _best(machine, layout, bases, room, there, score))
    picked = pool.Picked.of(found, kept, store.tokens.k.shape[2], spec.kv_heads)
    state = sum_up(machine, layout, bases, state, room, found, kept, k, v, fresh.valid.shape[2])
    state = dataclasses.replace(state, store=_laid_out(store, picked, k, v, counts))
    if state.far_votes is None:
        return state
    fade = 1.0 if chunk else jnp.where(waits, 1.0, rule.decay)
    return dataclasses.replace(
        state, near_votes=fade * state.near_votes, far_votes=fade * picked.take(found.votes)
    )


def _newest(state, fresh: pool.Candidates) -> jax.Array:
    """Position of the last token so far, int32 `[B]`: an exact one, or where none is recent one of the `fresh`."""
    last = jnp.max(jnp.where(fresh.valid, fresh.position, -1), axis=(1, 2), initial=-1)
    return jnp.maximum(exact_tokens.newest(state.ends[0]), last)


def _with_stored(state, room: Room, fresh: pool.Candidates, codes):
    """The stored tokens and behind them the `fresh` ones, as candidates and as codes of keys and of values."""
    pairs = zip(codes_of(state.store), codes, strict=True)
    return pool.join(pool.stored(state), fresh), *(pool.joined_codes(old, new, room) for old, new in pairs)


def _laid_out(store, picked: pool.Picked, k, v, counts):
    """The store with the picked of the candidates, of codes k and v, in the place of its tokens; rows that have no new
    ones keep what they hold to the bit."""
    held = hold(store, picked.take(k), picked.take(v), picked.length, picked.positions(store.tokens.positions.kv_heads))
    return dataclasses.replace(held, tokens=_of_idle(counts == 0, store.tokens, held.tokens))


def _of_idle(idle: jax.Array, before, after):
    """A segment as it is `after`, but for rows that are `idle` bool `[B]`."""
    def row_by_row(info, new, old):
        return jnp.where(idle.reshape(-1, *(1,) * (new.ndim - 1)), as_array(old), new)

    return map_leaves(row_by_row, after, before)


def _best(machine, layout, bases, room: Room, found: pool.Candidates, score) -> jax.Array:
    """Which candidates stay, bool `[B, J, S]`."""
    ends, rule = machine.ends_of(layout, bases), machine.selection
    shares = HeadShares(rule.allocation, rule.alpha, ends.sinks + ends.recent)
    share_by = found.votes if rule.heads_by == "attention" else score
    return pool.best(found, score, room.tokens, layout.spec.kv_heads, shares, share_by)


def _informed(layout, room: Room, score, sums, pairs, owner):
    """The score in the light of each layer's moments, summed over layers and over the heads of a unit.

    Args:
        pairs: of each layer keys after RoPE and values `[B, K, S, D]`, or `[B, 1, S, D]` of packed tokens.
    """
    scale, total = layout.spec.scale, 0.0
    for own, (k, v) in zip(sums, pairs, strict=True):
        if room.packed:
            k, v = (pool.owned_rows(x, owner) for x in (k, v))
            total = total + score * residual_norms(own, k, v, owner, scale)
        else:
            each = jnp.repeat(score, k.shape[1] // score.shape[1], axis=1)
            each = each * residual_norms(own, k, v, None, scale)
            total = total + each.reshape(*score.shape[:2], -1, score.shape[2]).sum(2)
    return total


def sum_up(machine, layout, bases, state, room: Room, found: pool.Candidates, kept, k, v, fresh: int):
    """Add the candidates that are not kept, with codes `[B, J, S, R]`, to the moments of every layer.

    Args:
        fresh: how many of the candidates are new at the most, so many leave.
    """
    if not state.gone:
        return state
    heads, store = layout.spec.kv_heads, state.store
    leaving = found.valid & ~kept
    most = heads * (fresh + 2) if room.packed else fresh
    slots = pool.compact(leaving, min(most, leaving.shape[-1]))
    there = jnp.arange(slots.shape[-1]) < leaving.sum(-1, keepdims=True)
    k, v, position = (pool.take_slots(x, slots) for x in (k, v, found.position))
    owner = None if found.owner is None else pool.take_slots(found.owner, slots)
    weight = pool.of_owners(there, owner, heads)
    where = PerHead(position, owner, heads)
    gone = tuple(
        moment_summary.update(sums, *machine.codec.decode(layout, bases.codec, store, k, v, where, i), weight)
        for i, sums in enumerate(state.gone)
    )
    return dataclasses.replace(state, gone=gone)


def _by_head(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return k.swapaxes(1, 2), v.swapaxes(1, 2)
