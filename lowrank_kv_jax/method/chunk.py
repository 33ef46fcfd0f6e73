"""A chunk of many tokens: it attends to itself and to what the cache holds, and is then coded, chosen from and summed up.

The first chunk of a prompt is compressed as a short prompt is. The next ones come here, and so do those of a turn that is
known as a whole; the two differ in what leaves the exact ends: of a prompt all but its sinks and last tokens, of a turn
what decoded tokens would.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import chosen, in_order, voting
from lowrank_kv_jax.method.codec import Ends, Tokens
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_partial
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.bits import Bits
from lowrank_kv_jax.storage.eight_bits import EightBits
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.state import take_tokens, write_tokens


def attend(layout: Layout, taps: Taps, window: int | None) -> AttnPartial:
    """Exact attention of a chunk to itself."""
    values = taps.v if taps.v.shape[-1] else taps.k
    return causal_partial(taps.q, taps.k, values, window=window, **layout.spec.logits)


def with_votes(machine: Any, layout: Layout, state: Any) -> Any:
    """An empty state that keeps votes until its prompt is complete, also where decoded queries have none."""
    if state.near_votes is not None or state.store is None or machine.selection is None:
        return state
    near = jnp.zeros((layout.batch, layout.spec.kv_heads, state.ends[0].k.shape[2]), jnp.float32)
    far = jnp.zeros(state.store.tokens.positions.position.shape, jnp.float32)
    return dataclasses.replace(state, near_votes=near, far_votes=far)


def settled(machine: Any, state: Any, several: jax.Array | None = None) -> Any:
    """A state whose prompt is complete: without votes that nothing will read, and those of the window for itself.

    Args:
        several: bool `[B]`, rows that were read in more than one chunk, None: all; others stay as after a whole prompt.
    """
    if not machine.votes or state.near_votes is None:
        return dataclasses.replace(state, near_votes=None, far_votes=None)
    if machine.selection.neighbours is None:
        return state
    sinks = state.ends[0].positions.start[:, :1]
    kept = jnp.arange(state.near_votes.shape[2]) < sinks
    kept = kept if several is None else kept | ~several[:, None]
    return dataclasses.replace(state, near_votes=jnp.where(kept[:, None], state.near_votes, 0.0))


def ingest(
    machine: Any, layout: Layout, bases: Any, state: Any, tokens: tuple[Tokens, ...],
    seen: tuple[voting.Seen | None, ...], counts: jax.Array, *, of_prompt: bool,
) -> Any:
    """The state of a group with the first `counts[b]` of T more tokens, which have attended.

    Args:
        tokens: of each layer, `[B, T, ...]`, at consecutive positions from each row's length on.
        seen: of each layer, the votes of the chunk's queries; None where there are none.
        counts: int32 `[B]`.
        of_prompt: whether they go on with the prompt, or come behind it.
    """
    ends = machine.ends_of(layout, bases)
    if ends.everything(layout) or not (of_prompt or ends.flushes):
        held = tuple(_appended(part, own, counts) for part, own in zip(state.ends, tokens, strict=True))
        return dataclasses.replace(state, ends=held)
    rule = _leaving(ends, of_prompt, state.ends[0].k.shape[2])
    passed = [_pass(layout, part, own, rule, counts) for part, own in zip(state.ends, tokens, strict=True)]
    shift = 0 if of_prompt else 1
    held = tuple(
        exact_tokens.Exact(k, v, part.length + counts - line.leaving, part.positions.skip(shift, line.leaving))
        for part, (k, v, line) in zip(state.ends, passed, strict=True)
    )
    lines = tuple(line for *_, line in passed)
    if machine.selection is not None:
        return _choose(machine, layout, bases, state, held, lines, rule, seen, counts, of_prompt)
    return _code(machine, layout, bases, dataclasses.replace(state, ends=held), lines, ends, of_prompt)


def _appended(part: exact_tokens.Exact, new: Tokens, counts: jax.Array) -> exact_tokens.Exact:
    most = part.k.shape[2]  # no more than there are slots
    return exact_tokens.append(part, new.k[:, :most], new.v[:, :most], counts)


# ---- what leaves the exact ends ---------------------------------------------------------------------------------


class Leaving(NamedTuple):
    """Slots at the front that stay, tokens behind them that stay, tokens that leave together, and that wait until so
    many have gathered; `room`: most tokens that lie behind the front when a chunk comes."""

    first: int
    stay: int
    unit: int
    wait: int
    room: int


def _leaving(ends: Ends, of_prompt: bool, slots: int) -> Leaving:
    first, stay = (ends.sinks, ends.recent) if of_prompt else (ends.first, ends.stay)
    wait, first = 0 if of_prompt else ends.wait, min(first, slots)
    return Leaving(first, stay, ends.unit, wait, min(stay + ends.unit - 1 + wait, slots - first))


class Line(NamedTuple):
    """Tokens of a layer behind the front of its exact ends, old ones and then new ones.

    Attributes:
        tokens: `[B, L, ...]`.
        there: int32 `[B]`, how many of them there are.
        leaving: int32 `[B]`, how many of the first leave.
    """

    tokens: Tokens
    there: jax.Array
    leaving: jax.Array


def _pass(layout: Layout, part: exact_tokens.Exact, new: Tokens, rule: Leaving, counts: jax.Array):
    """Keys and values of the exact ends `[B, K, E, D]` once a chunk has passed through them, and what passed."""
    slots, held = part.k.shape[2], part.length
    there = jnp.maximum(held + counts - rule.first, 0)
    stay = jnp.where(there >= rule.stay + rule.wait, rule.stay, there) if rule.wait else rule.stay
    leaving = jnp.maximum(there - stay, 0) // rule.unit * rule.unit
    old = in_order.oldest(layout, part, rule.first, rule.room)
    lines, ends = {}, []
    for name in ("k", "v"):
        line = _behind(_front(getattr(part, name), rule.first + rule.room), getattr(new, name), held, counts)
        front, rest = line[:, :, : rule.first], line[:, :, rule.first :]
        rest, lines[name] = take_tokens(rest, leaving, slots - rule.first), rest.swapaxes(1, 2)
        ends.append(exact_tokens.filled(getattr(part, name), jnp.concatenate([front, rest], axis=2)))
    # of latents the norm is left out, which only turns their length: they are normed again where they are read
    before = old.k if layout.spec.latent is not None else old.k_pre
    lines["k_pre"] = _behind(before.swapaxes(1, 2), new.k_pre, held - rule.first, counts).swapaxes(1, 2)
    begin = new.positions[:, :1] - held[:, None] + rule.first
    positions = begin + jnp.arange(lines["k"].shape[1], dtype=jnp.int32)
    return *ends, Line(Tokens(**lines, positions=positions), there, leaving)


def _front(buffer: Any, size: int) -> jax.Array:
    front = buffer[:, :, :size]
    if isinstance(front, EightBits):
        return front.astype(jnp.float32)  # which the same codes hold
    return front.widened() if isinstance(front, Bits) else front


def _behind(old: jax.Array, new: jax.Array, at: jax.Array, counts: jax.Array) -> jax.Array:
    """Slots `[B, K, n, D]` and T more, with tokens `[B, T, K, D]` from slot `at` `[B]` on."""
    new, dtype = new.swapaxes(1, 2), jnp.promote_types(old.dtype, new.dtype)
    line = jnp.concatenate([old.astype(dtype), jnp.zeros_like(new, dtype)], axis=2)
    return write_tokens(line, new.astype(dtype), at, counts)


# ---- in order ---------------------------------------------------------------------------------------------------


def _code(machine, layout: Layout, bases, state, lines: tuple[Line, ...], ends: Ends, of_prompt: bool):
    if state.store is None:
        return state
    codec, leaving = machine.codec, lines[0].leaving
    size = lines[0].tokens.k.shape[1]
    most = min(size - (ends.recent if of_prompt else ends.stay), ends.coded(layout))
    if most < 1:
        return state
    tokens = tuple(Tokens(*(x[:, : most + ends.ahead] for x in line.tokens)) for line in lines)
    there = jnp.clip(lines[0].there, 0, tokens[0].k.shape[1])
    start = state.store.tokens.length if state.marks else None
    store = codec.take_in(layout, bases.codec, state.store, tokens, leaving, there, of_prompt=of_prompt)
    if of_prompt:
        store = _behind_the_gap(store, leaving)
    marks = in_order.marked(machine, state.marks, tokens, start, leaving)
    return dataclasses.replace(state, store=store, marks=marks)


def _behind_the_gap(store: Any, counts: jax.Array) -> Any:
    """The store with the gap that the prompt's last tokens leave, if there is one, `counts` `[B]` slots further back."""
    def moved(x):
        if not isinstance(x, Runs) or x.start.shape[1] < 2:
            return x
        return Runs(x.start.at[:, 1].add(counts), x.jump)

    return jax.tree.map(moved, store, is_leaf=lambda x: isinstance(x, Runs))


# ---- behind a selection -----------------------------------------------------------------------------------------


def _choose(machine, layout, bases, state, held, lines, rule: Leaving, seen, counts, of_prompt: bool):
    before, leaving = state.ends[0].length, lines[0].leaving
    most = max(lines[0].tokens.k.shape[1] - rule.stay, 0)
    tokens = tuple(Tokens(*(x[:, :most] for x in line.tokens)) for line in lines)
    votes = jnp.zeros((layout.batch, layout.spec.kv_heads, most), jnp.float32)
    state = dataclasses.replace(state, ends=held)
    if state.near_votes is not None:
        share, found = voting.share_that_stays(machine.selection, counts), [own for own in seen if own is not None]
        near = share * state.near_votes + sum(own.near for own in found)
        slots = near.shape[2]
        line = jnp.pad(near[:, :, : rule.first + rule.room], ((0, 0), (0, 0), (0, found[0].fresh.shape[2])))
        fresh = functools.reduce(jnp.add, [own.fresh for own in found])
        line = write_tokens(line[..., None], fresh[..., None], before, counts)[..., 0]
        front, rest = line[:, :, : rule.first], line[:, :, rule.first :]
        votes = rest[:, :, :most]
        rest = take_tokens(rest[..., None], leaving, slots - rule.first)[..., 0]
        there = jnp.arange(slots) < held[0].length[:, None, None]
        near = jnp.where(there, jnp.concatenate([front, rest], axis=2), 0.0)
        far = state.far_votes
        far = None if far is None else share * far + sum(own.far for own in found)
        state = dataclasses.replace(state, near_votes=near, far_votes=far)
    if not most:
        return state
    return chosen.admit(machine, layout, bases, state, tokens, leaving, votes, chunk=True, of_prompt=of_prompt)
