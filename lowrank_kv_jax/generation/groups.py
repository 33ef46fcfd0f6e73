"""A group of layers and its cache: compressed, appended to, refreshed. Whose decoder it is does not matter here."""

import functools
from typing import Any

import jax
from jaxtyping import Int

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.storage.bits import hold_bits, like_before
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.sharding import constrain


@functools.partial(jax.jit, static_argnames=("method", "layout"))
def compress_group(method: Part, layout: Layout, bases: Any, taps: tuple[Taps, ...], lengths: Int[jax.Array, " B"]):
    """The compressed state of a group of layers whose prompt was prefilled."""
    method = machine_of(method)
    empty = constrain(layout.mesh, method.init(layout, bases))
    return constrain(layout.mesh, hold_bits(method.compress(layout, bases, empty, taps, lengths)))


def step_group(
    method: Part, layout: Layout, place: Place, bases: Any, state: Any, taps: Taps,
    positions: Int[jax.Array, "B T"], counts: Int[jax.Array, " B"],
) -> tuple[Any, AttnPartial]:
    """Append T tokens to the cache of one layer of a group and attend through it; not compiled by itself."""
    machine, before = machine_of(method), state
    state = machine.append(layout, bases, state, taps, counts, positions, place)
    partial = with_sink(machine.attend(layout, bases, state, taps.q, positions, place), taps.sink_logits)
    state = machine.observe(layout, bases, state, taps.q, partial.lse, positions, place)
    return constrain(layout.mesh, like_before(before, state)), partial


@functools.partial(jax.jit, static_argnames=("method", "layout"), donate_argnames=("state",))
def refresh_group(method: Part, layout: Layout, bases: Any, state: Any):
    """The state of a group after the method's periodic work."""
    refreshed = machine_of(method).refresh(layout, bases, lay_out(state, "rows"))
    return constrain(layout.mesh, like_before(state, lay_out(refreshed, layout.tokens)))
