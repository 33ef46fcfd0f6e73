"""One layer of a model as a compiled program, which all of its layers share, and what surrounds them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Float, Int

from lowrank_kv_jax.generation.groups import read_chunk, step_group
from lowrank_kv_jax.generation.rereading import read_chunk_twice
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.coded_prompt import as_coded
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import block_output, block_prefill, block_taps, embed, unembed
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention
from lowrank_kv_jax.selections.reread import attend_twice
from lowrank_kv_jax.storage.backend import on_gpu
from lowrank_kv_jax.storage.over_tokens import over_mesh

LEAST_ROWS = 4
"""Of a product on a GPU."""

OF_TOKENS = 4
"""Axes of what is held of tokens, of rows and heads."""


@functools.partial(jax.jit, static_argnames=("config", "window", "mesh"))
def layer_prefill(
    config: ModelConfig, window: int | None, layer: Any, x: jax.Array, positions: jax.Array, mesh: Mesh | None = None
):
    """Exact causal attention within the prompt: the residual stream after the layer and its taps.

    Args:
        mesh: that weights and prompts lie over; None: one device, or nothing is known.
    """
    attend = functools.partial(causal_attention, **config.attention.logits, window=window)
    with over_mesh(mesh):
        return block_prefill(config, layer, x, positions, attend)


@functools.partial(jax.jit, static_argnames=("config", "window", "mesh"))
def layer_prefill_twice(
    config: ModelConfig, window: int | None, layer: Any, x: jax.Array, positions: jax.Array, lengths: jax.Array,
    mesh: Mesh | None = None,
):
    """The same for a prompt `[B, S, H]` with a copy behind it, `[B, 2 S, H]`; taps of the prompt, with `reread`."""
    size, votes = x.shape[1] // 2, []

    def attend(q, k, v, sink_logits=None):
        out, found = attend_twice(
            q, k, v, lengths, **config.attention.logits, window=window, sink_logits=sink_logits
        )
        votes.append(found)
        return out

    with over_mesh(mesh):
        x, taps = block_prefill(config, layer, x, positions, attend)
    return x, taps.part(slice(size))._replace(reread=votes[0])


@functools.partial(jax.jit, static_argnames=("config", "window", "method", "layout", "twice"))
def layer_prefill_coded(
    config: ModelConfig, window: int | None, method: Part, layout: Layout, layer: Any, bases: Any, x: jax.Array,
    positions: jax.Array, lengths: jax.Array, twice: bool,
):
    """Attention of a prompt to what a method codes its tokens as: the residual stream after the layer and exact taps.

    Args:
        bases: of the group, as `compress_group` takes them.
        lengths: int32 `[B]`.
        twice: whether a copy of the prompt stands behind it, as for `layer_prefill_twice`.
    """
    taps = block_taps(config, layer, x, positions)
    seen, rule = as_coded(machine_of(method), layout, bases, taps, positions, lengths), config.attention.logits
    if twice:
        with over_mesh(layout.mesh):
            out, votes = attend_twice(
                seen.q, seen.k, seen.v, lengths, **rule, window=window, sink_logits=taps.sink_logits)
        return block_output(config, layer, x, out), taps.part(slice(x.shape[1] // 2))._replace(reread=votes)
    sinks = () if taps.sink_logits is None else (taps.sink_logits,)
    with over_mesh(layout.mesh):
        out = causal_attention(seen.q, seen.k, seen.v, *sinks, **rule, window=window)
    return block_output(config, layer, x, out), taps


@functools.partial(jax.jit, static_argnames=("config", "method", "layout", "place"), donate_argnames=("state",))
def layer_extend(config, method, layout, place, layer, bases, state, x, positions, counts, index=None):
    """Append T tokens to one layer's cache and attend through it.

    Args:
        place, state, index: see `groups.Given`.
    """
    place = indexed(place, index)
    rows, x = len(x), _enough_rows(layer, x)
    x, state = _not_before(layout, x, state) if on_gpu() else (x, state)
    taps = block_taps(config, layer, x, _as_many(positions, len(x))).rows(rows)
    state, partial = step_group(method, layout, place, bases, state, taps, positions, counts)
    return block_output(config, layer, x, _as_many(partial.out, len(x)))[:rows], state


def _not_before(layout: Layout, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """A layer's input and state, of which no tokens are widened before the input is there.

    Tokens wait for nothing: in a program of all layers XLA would widen those of all of them at once, at its beginning.
    What lies over several devices is left alone, because a barrier hides from XLA how it lies.
    """
    if layout.mesh is not None:
        return jax.lax.optimization_barrier(x), state
    leaves, treedef = jax.tree.flatten(state)
    tokens = [number for number, leaf in enumerate(leaves) if leaf.ndim >= OF_TOKENS]
    x, later = together(x, [leaves[number] for number in tokens])
    for number, leaf in zip(tokens, later, strict=True):
        leaves[number] = leaf
    return x, treedef.unflatten(leaves)


def indexed(place: Place, index: jax.Array | None) -> Place:
    """A place with the index that came with it, if one did."""
    return place if index is None else dataclasses.replace(place, index=index)


def _enough_rows(layer: Any, x: jax.Array) -> jax.Array:
    """The residual stream `[B, T, H]`; on a GPU its rows repeated where they are too few.

    There XLA makes one program of a norm, and one of several products of one factor, where it has several rows. Of the
    product of a single one it stores each summand, in 16 bits, before it adds them. The barrier of `_not_before` hides
    that rows are alike. Of experts more would be read for more tokens.
    """
    tokens = x.shape[0] * x.shape[1]
    if tokens >= LEAST_ROWS or not on_gpu() or "experts" in layer.get("mlp", ()):
        return x
    return _as_many(x, len(x) * -(-LEAST_ROWS // tokens))


def _as_many(x: jax.Array, rows: int) -> jax.Array:
    """Rows `[B, ...]` repeated until there are so many, a multiple of B."""
    return jnp.tile(x, (rows // len(x), *(1,) * (x.ndim - 1)))


@functools.partial(jax.jit, static_argnames=("config", "method", "layout", "place"))
def layer_read(config, method, layout, place, layer, bases, state, x, positions, counts, index=None):
    """A layer over a chunk of T tokens, which attends to itself exactly and to the layer's cache as it is.

    Returns:
        The residual stream, the chunk's taps and what its queries say of the tokens, both for `ingest_group`.
    """
    taps = block_taps(config, layer, x, positions)
    partial, seen = read_chunk(method, layout, indexed(place, index), bases, state, taps, positions, counts)
    return block_output(config, layer, x, partial.out), taps._replace(q=taps.q[..., :0], x=None), seen


@functools.partial(jax.jit, static_argnames=("config", "method", "layout", "place"))
def layer_read_twice(config, method, layout, place, layer, bases, state, x, positions, counts, index=None):
    """The same for a chunk `[B, T, H]` with a copy behind it, `[B, 2 T, H]`; taps of the chunk."""
    taps = block_taps(config, layer, x, positions)
    out, taps, seen = read_chunk_twice(method, layout, indexed(place, index), bases, state, taps, positions, counts)
    return block_output(config, layer, x, out), taps._replace(q=taps.q[..., :0], x=None), seen


@functools.partial(jax.jit, static_argnums=0)
def embed_tokens(config: ModelConfig, params: Any, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """As `embed`.

    XLA for a GPU makes a slice of a gather of one row, and on a mesh hands every device the whole table for it: one
    token is looked up twice.
    """
    if tokens.size > 1 or not on_gpu():
        return embed(config, params, tokens, positions)
    return embed(config, params, _as_many(tokens, 2), None if positions is None else _as_many(positions, 2))[:1]


logits_of = jax.jit(unembed, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def last_logits(config, params, x, counts):
    """Logits `[B, V]` at the last valid token of each row of `x` `[B, T, H]`."""
    return unembed(config, params, last_hidden(x, counts))[:, 0]


@jax.jit
def last_hidden(x: Float[jax.Array, "B T H"], counts: Int[jax.Array, " B"]) -> Float[jax.Array, "B 1 H"]:
    """The residual stream `[B, 1, H]` at the last valid token of each row."""
    return jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)


def together(*trees: Any) -> Any:
    """The same trees, none of which a compiler may compute a part of later than the others."""
    leaves, treedef = jax.tree.flatten(trees)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return trees
    return treedef.unflatten(jax.lax.optimization_barrier(leaves))
