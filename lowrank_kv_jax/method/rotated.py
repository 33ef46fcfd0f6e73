"""Attention by index in the cache: sinks and selected tokens move up to the recent ones, as StreamingLLM has it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.method.codec import codes_of
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.segments import exact as exact_tokens


def attend_by_index(
    method: Any, layout, bases, state, q: jax.Array, positions: jax.Array, place, window: int | None
) -> AttnPartial:
    """Attention over the retained tokens of one layer.

    Logits depend on distances only, and among recent tokens index and position differ by a constant: it is enough to
    move the queries nearer to the tokens before them.

    Stored keys are turned at every step, so that they must be stored as they are.

    Args:
        window: of recent tokens; the layer's sliding window, or what a selection lets a query see at the most.
    """
    spec, exact = layout.spec, state.ends[place.held]
    sinks = method.ends_of(layout, bases).sinks
    near = exact_tokens.part(exact, sinks, exact.k.shape[2]) if sinks else exact
    turned = method.selection.positions == "cache" and spec.rope is not None
    index, kept = _indices(exact, state.store, spec.kv_heads)
    moved, nearer = q, jnp.zeros((*positions.shape, 1), jnp.int32)
    if turned:
        begin = exact.positions.at(jnp.asarray([sinks]))  # [B, 1], position of the first recent token
        if window != place.window:
            begin = jnp.maximum(begin, positions - method.ends_of(layout, bases).recent + 1)
        nearer = -jnp.maximum(begin[:, :, None] - sinks - kept[:, None], 0)  # [B, T or 1, K]
        nearer = jnp.where(exact.length[:, None, None] > sinks, nearer, 0)
        nearer = jnp.broadcast_to(nearer, (*positions.shape, nearer.shape[2]))
        angles = jnp.repeat(nearer, q.shape[2] // nearer.shape[2], axis=2)
        moved = rotate(q, *rope_angles(spec.rope, angles))
    first = None
    if sinks:
        at = positions + nearer[..., 0] if state.store is None else positions
        first = exact_tokens.asked(exact_tokens.part(exact, 0, sinks), moved, at, place.window)
    if state.store is None:
        return exact_tokens.attend(near, q, positions, **spec.logits, window=window, beside=first)
    store, tokens = state.store, state.store.tokens
    if turned:
        there = jnp.arange(tokens.k.shape[2])[None, None] < tokens.length[:, None, None]
        turn = jnp.where(there, sinks + index - tokens.positions.position, 0)
        tokens = dataclasses.replace(tokens, k=rotate(codes_of(store)[0], *rope_angles(spec.rope, turn)))
        store = dataclasses.replace(store, tokens=tokens)
    beside = exact_tokens.asked(near, q, positions, window)
    part = method.codec.attend(layout, bases.codec, store, moved, positions, place, beside)
    return part if first is None else merge([attend_to(first, **spec.logits), part])


def _indices(exact: exact_tokens.Exact, store: Any, heads: int) -> tuple[jax.Array, jax.Array]:
    """Of each stored token its index among those of its head `[B, J, S]`, and how many every head has `[B, K]`."""
    if store is None:
        none = jnp.zeros((exact.length.shape[0], heads), jnp.int32)
        return none, none
    tokens = store.tokens
    where = tokens.positions
    there = jnp.arange(tokens.k.shape[2])[None, None] < tokens.length[:, None, None]
    there = jnp.broadcast_to(there, where.position.shape)
    owner = jnp.zeros_like(where.position, jnp.int8) if where.owner is None else where.owner
    buffer_heads = 1 if where.owner is None else heads
    mine = there[:, :, None] & (owner[:, :, None] == jnp.arange(buffer_heads)[:, None])
    index = jnp.sum(jnp.where(mine, jnp.cumsum(mine, axis=-1) - 1, 0), axis=2)
    kept = mine.sum(-1).reshape(mine.shape[0], -1)
    return index, jnp.repeat(kept, heads // kept.shape[1], axis=1)
