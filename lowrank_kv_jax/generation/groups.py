"""A group of layers and its cache: compressed, appended to, refreshed. Whose decoder it is does not matter here."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Int

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.sink_logits import with_sink
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.chunk import with_votes
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.storage.held import hold, like_before
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.over_tokens import over_mesh
from lowrank_kv_jax.storage.sharding import constrain


@functools.partial(jax.jit, static_argnames=("method", "layout", "goes_on"))
def compress_group(
    method: Part, layout: Layout, bases: Any, taps: tuple[Taps, ...], lengths: Int[jax.Array, " B"],
    goes_on: bool = False,
):
    """The compressed state of a group of layers whose prompt was prefilled, or its first chunk where it `goes_on`."""
    method = machine_of(method)
    empty = method.init(layout, bases)
    empty = constrain(layout.mesh, with_votes(method, layout, empty) if goes_on else empty)
    with over_mesh(layout.mesh):
        held = hold(method.compress(layout, bases, empty, taps, lengths), layout.mesh)
    return constrain(layout.mesh, lay_out(held, layout.tokens))


class Given(NamedTuple):
    """What a layer's program is given of its group, outside of a trace.

    Where layers are alike one program serves them all: the state is then the layer's alone, and its index, int32, no part
    of the static place. Elsewhere the index is None.
    """

    place: Place
    state: Any
    index: np.int32 | None


def given(method: Part, layout: Layout, place: Place, state: Any, x: jax.Array) -> Given:
    """Of the layer at a place, from the state of its group; where the layer's input `x` is traced, the whole model
    becomes one program anyway."""
    alike = machine_of(method).codec.layers_alike and layout.spec.latent is None
    if isinstance(x, Tracer) or len(state.ends) == 1 or not alike:
        return Given(place, state, None)
    own = dataclasses.replace(place, index=0, alone=True)
    return Given(own, state.of_layer(place.index), np.int32(place.index))


def taken_back(before: Any, place: Place, own: Given, after: Any) -> Any:
    """The state of the group, which was `before`, when that of `given` has become `after`."""
    return after if own.index is None else before.with_layer(place.index, after)


def step_group(
    method: Part, layout: Layout, place: Place, bases: Any, state: Any, taps: Taps,
    positions: Int[jax.Array, "B T"], counts: Int[jax.Array, " B"],
) -> tuple[Any, AttnPartial]:
    """Append T tokens to the cache of one layer of a group and attend through it; not compiled by itself."""
    machine, before = machine_of(method), state
    with over_mesh(layout.mesh):
        state, q = machine.append_with_query(layout, bases, state, taps, counts, place)
        partial = with_sink(machine.attend(layout, bases, state, q, positions, place), taps.sink_logits)
        state = machine.observe(layout, bases, state, q, partial.lse, positions, place)
    return constrain(layout.mesh, like_before(before, state)), partial


def read_chunk(
    method: Part, layout: Layout, place: Place, bases: Any, state: Any, taps: Taps, positions: Int[jax.Array, "B T"],
    counts: Int[jax.Array, " B"],
) -> tuple[AttnPartial, Any]:
    """Attend from a chunk of T tokens to itself and to a layer's cache, which stays as it is; not compiled by itself.

    Returns:
        The partial, and what its queries say of the tokens, for `ingest_group`.
    """
    with over_mesh(layout.mesh):
        return machine_of(method).read_chunk(layout, bases, state, taps, positions, counts, place)


@functools.partial(jax.jit, static_argnames=("method", "layout", "of_prompt"), donate_argnames=("state",))
def ingest_group(
    method: Part, layout: Layout, bases: Any, state: Any, taps: tuple[Taps, ...], seen: tuple[Any, ...],
    positions: Int[jax.Array, "B T"], counts: Int[jax.Array, " B"], of_prompt: bool,
):
    """The state of a group of layers with a chunk that has attended.

    Args:
        taps: of each layer, T tokens.
        seen: of each layer, what `read_chunk` returned.
        of_prompt: whether the chunk goes on with the prompt, or comes behind it.
    """
    rows = lay_out(state, "rows")
    with over_mesh(layout.mesh):
        filled = machine_of(method).ingest(layout, bases, rows, taps, seen, positions, counts, of_prompt=of_prompt)
    return constrain(layout.mesh, like_before(state, lay_out(filled, layout.tokens)))


@functools.partial(jax.jit, static_argnames=("method", "layout"), donate_argnames=("state",))
def refresh_group(method: Part, layout: Layout, bases: Any, state: Any):
    """The state of a group after the method's periodic work."""
    with over_mesh(layout.mesh):
        refreshed = machine_of(method).refresh(layout, bases, lay_out(state, "rows"))
    return constrain(layout.mesh, like_before(state, lay_out(refreshed, layout.tokens)))
