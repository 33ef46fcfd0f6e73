"""Tokens in more bits than the others: those on which the common widths err most.

What a text seldom holds, a rare name or a long number, lies far from the directions and deviations that were calibrated;
it is also what a question asks for. So a share of the tokens, those that common codes leave the most of, have widths of
their own, as adaptive transform coding gives classes of blocks their own (Chen and Smith, 1977). No query and no second
reading chooses them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.transform_bases import TransformBases, errors
from lowrank_kv_jax.codecs.transform_store import SIDES, Transformed, centred, runs_in
from lowrank_kv_jax.method.choice import compact, ranks
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.positions import PerHead


def classes(store: Transformed) -> tuple[Transformed, ...]:
    """The common tokens of a store and, where there are any, the fine ones: each a store of one class."""
    common = dataclasses.replace(store, fine=None, fine_profile=None)
    if store.fine is None:
        return (common,)
    return common, dataclasses.replace(
        common, tokens=store.fine, profile=store.fine_profile, k_step=None, v_step=None
    )


def take_in(
    codec: Any, layout: Layout, bases: TransformBases, store: Transformed, tokens: tuple[Tokens, ...], counts: jax.Array,
    every: int, begins: bool,
) -> Transformed:
    """Code tokens behind what a store with room for fine ones holds; of every so many so far, one is fine.

    Args:
        tokens: of each layer, `[B, T, ...]`.
        counts: int32 `[B]`, how many of the first there are.
        begins: whether the store is empty.
    """
    size = tokens[0].k.shape[1]
    if not size:
        return store
    (common, fine), held = classes(store), store.fine
    assert held is not None
    codes = codec.encode(layout, bases, common, tokens)
    left = sum(
        errors(bases, side, runs, centred(bases, common, side, [getattr(own, name) for own in tokens]), code)
        for side, name, code in zip(SIDES, (codec.keys, "v"), _calibrated(common, codes), strict=True)
        if (runs := runs_in(common, side)) is not None
    )
    there = jnp.arange(size) < counts[:, None]
    wanted = (store.tokens.length + held.length + counts) // every - held.length
    chosen = there & (ranks(jnp.where(there, left, -jnp.inf)) < wanted[:, None])
    others = compact(there & ~chosen, min(size, store.tokens.k.shape[2]))
    some = compact(chosen, min(size // every + 1, held.k.shape[2]))
    fine_codes = codec.encode(layout, bases, fine, tuple(_at(own, some) for own in tokens))
    codes = tuple(jnp.take_along_axis(code, others[:, None, :, None], axis=2) for code in codes)

    def put(segment: coded_tokens.Coded, codes, slots: jax.Array, counts: jax.Array) -> coded_tokens.Coded:
        position = jnp.take_along_axis(tokens[0].positions, slots, axis=1)[:, None].astype(jnp.int32)
        if not begins:
            return coded_tokens.append(segment, *codes, counts, position)
        where = PerHead(position, None, layout.spec.kv_heads).with_slots(segment.k.shape[2])
        return coded_tokens.hold(segment, *codes, counts, where)

    return dataclasses.replace(
        store, tokens=put(store.tokens, codes, others, counts - wanted), fine=put(held, fine_codes, some, wanted)
    )


def _at(tokens: Tokens, slots: jax.Array) -> Tokens:
    """Those at `slots` `[B, M]`."""
    def taken(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, slots.reshape(*slots.shape, *(1,) * (x.ndim - 2)), axis=1)

    return Tokens(*map(taken, tokens))


def _calibrated(store: Transformed, codes: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    """Codes in units of the calibrated steps, of codes in those of each row."""
    return [code if step is None else code * step.astype(code.dtype)[:, :, None]
            for code, step in zip(codes, (store.k_step, store.v_step), strict=True)]
