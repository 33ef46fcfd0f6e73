"""Without a selection: every token between the ends is coded, in order."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.positions import Runs


def compress(machine: Any, layout, bases, state, taps, lengths):
    ends, codec = machine.ends_of(layout, bases), machine.codec
    counts = jnp.maximum(lengths - ends.sinks - ends.recent, 0) // ends.unit * ends.unit
    exact = tuple(
        exact_tokens.hold_prompt(part, tap.k, tap.v, lengths, ends.sinks, ends.recent + ends.unit - 1, counts)
        for part, tap in zip(state.ends, taps, strict=True)
    )
    if state.store is None:
        return dataclasses.replace(state, ends=exact)
    size = taps[0].k.shape[1]
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    weight = (slots >= ends.sinks) & (slots < ends.sinks + counts[:, None])
    store = codec.learn(layout, bases.codec, state.store, taps, lengths, weight.astype(jnp.float32))
    end = min(size, max(size - ends.recent, ends.sinks) + ends.ahead)
    part = slice(ends.sinks, max(end, ends.sinks))
    tokens = tuple(Tokens(tap.k[:, part], tap.k_pre[:, part], tap.v[:, part], slots[:, part]) for tap in taps)
    zero = jnp.zeros_like(counts)
    after = zero + (ends.recent if ends.first > ends.sinks else 0)
    where = Runs(jnp.stack([zero, counts], axis=1), jnp.stack([zero + ends.sinks, after], axis=1))
    seen = jnp.clip(lengths - ends.sinks, 0, part.stop - part.start)
    store = codec.take_in(layout, bases.codec, store, tokens, counts, seen, where)
    marks = marked(machine, state.marks, tokens, zero, counts)
    return dataclasses.replace(state, ends=exact, store=store, marks=marks)


def marked(machine, marks: tuple[Any, ...], tokens: Sequence[Tokens], start: jax.Array, counts: jax.Array):
    """Marks of each layer with tokens that come to be stored."""
    reading = machine.standing_reading
    if reading is None or not tokens[0].k.shape[1]:
        return marks
    return tuple(reading.add(own, new.k, start, counts) for own, new in zip(marks, tokens, strict=False))


def refresh(machine, layout, bases, state):
    ends, codec = machine.ends_of(layout, bases), machine.codec
    stay, most = ends.stay, ends.most(layout)
    if ends.wait:  # rows that have not gathered enough wait on
        length = state.ends[0].length
        stay = jnp.where(length >= ends.sinks + ends.recent + ends.wait, stay, length)
    tokens = tuple(oldest(layout, part, ends.first, most + ends.ahead) for part in state.ends)
    flushed = [exact_tokens.flush(part, ends.first, stay, most, ends.unit) for part in state.ends]
    counts = flushed[0][1].counts
    seen = jnp.clip(state.ends[0].length - ends.first, 0, tokens[0].k.shape[1])
    start = state.store.tokens.length if state.marks else None
    store = codec.take_in(layout, bases.codec, state.store, tokens, counts, seen)
    marks = marked(machine, state.marks, tokens, start, counts)
    return dataclasses.replace(state, ends=tuple(part for part, _ in flushed), store=store, marks=marks)


def oldest(layout: Layout, part: exact_tokens.Exact, first: int, size: int) -> Tokens:
    """The next tokens that leave an exact segment, and those ahead of them."""
    size = min(size, part.k.shape[2] - first)
    k, v = (x[:, :, first : first + size].swapaxes(1, 2) for x in (part.k, part.v))
    positions = part.positions.at(first + jnp.arange(size))
    if layout.spec.rope is None:
        return Tokens(k, k, v, positions)
    cos, sin = rope_angles(layout.spec.rope, positions[:, :, None])
    return Tokens(k, rotate(k.astype(jnp.float32), cos, -sin), v, positions)
