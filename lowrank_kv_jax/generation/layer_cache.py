"""The cache of one layer of a decoder of your own: taps in, attention out.

    plans = plan_layers(method, spec, prompt=128, capacity=256)        # static shapes and bases; one plan a layer
    cache = prefill_layer(plans[0], taps)                              # the prompt has attended exactly, in your decoder
    cache, out = append_and_attend(plans[0], cache, taps)              # new tokens, at `cache.positions(T)`
    cache = refresh_layer(plans[0], cache)                             # after at most `block` of them

Plans and caches are pytrees: give both to `jax.jit` as arguments and donate the caches. Those of layers of one kind have
one structure, so that they may be stacked for `jax.lax.scan`. A method whose layers share a store (`method.layer_groups`)
has a plan for each group: `prefill_layer` takes the taps of all its layers, and `append_and_attend` is called for one
after the other.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.generation.groups import compress_group, refresh_group, step_group
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.cache import check_method
from lowrank_kv_jax.method.describe import as_html, as_text
from lowrank_kv_jax.method.filling import checked_lengths, guard, next_block, refreshed, with_block
from lowrank_kv_jax.method.group import GroupState
from lowrank_kv_jax.method.layout import layout_of
from lowrank_kv_jax.method.part import block_of
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.storage.sharding import check_mesh, replicate, rows_together
from lowrank_kv_jax.storage.state import leaf, state, static


@state
class LayerPlan:
    """How a layer, or a group of layers that share a store, is cached; read-only, made by `plan_layers`.

    It serves any number of rows: that of a cache is its own.

    Attributes:
        bases: what the method knows of the group.
        method: how it compresses.
        layout: the static shape of the cache, of one row (of as many as the mesh cuts apart).
        windows: sliding window of each layer of the group.
    """

    bases: Any
    method: Part = static()
    layout: Layout = static()
    windows: tuple[int | None, ...] = static()


@state
class LayerCache:
    """The cache of a layer, or of a group of layers; `fork`, `take_rows`, `insert_rows` and `with_token_layout` take it.

    Attributes:
        group: what the method stores.
        length: int32 `[B]`, tokens that each row has seen.
        limit: int32 `[B]`, tokens that each row may see.
        pending: int32 scalar, slots used since the last refresh.
        method, layout: those of its plan.
        turn: which layer of the group is next.
        goes_on: whether more chunks of its prompt come, see `layer_chunks`.
    """

    group: GroupState
    length: jax.Array = leaf("batch", kind="indices")
    limit: jax.Array = leaf("batch", kind="indices")
    pending: jax.Array = leaf(kind="indices")
    method: Part = static()
    layout: Layout = static()
    turn: int = static(default=0)
    goes_on: bool = static(default=False)

    __repr__, _repr_html_ = as_text, as_html

    def positions(self, tokens: int = 1) -> jax.Array:
        """Of the next tokens, int32 `[B, T]`: what they must be rotated by."""
        return self.length[:, None] + jnp.arange(tokens, dtype=jnp.int32)


def plan_layers(
    method: Part | str, spec: AttentionSpec, *, prompt: int, capacity: int | None = None, block: int | None = None,
    dtype: Any = None, bases: Sequence[Any] | None = None, mesh: jax.sharding.Mesh | None = None,
) -> tuple[LayerPlan, ...]:
    """A plan for each group of layers, in the order of the layers: for most methods one for each layer.

    Args:
        method: how to compress, or its spec (see `parse_method`).
        spec: the decoder's attention.
        prompt: length that prompts are padded to, on the right.
        capacity: longest sequence, the prompt included; the prompt and one block more by default.
        block: tokens that may be appended between two refreshes, `layout.block` of the plans; None: as many as the
            method asks for.
        dtype: of the cache, `default_cache_dtype()` by default.
        bases: what `Calibrator.bases` returned, where the method is calibrated.
        mesh: lay the caches out over these devices, rows over "data", kv heads over "model", slots of stores
            over "tokens".

    Raises:
        ValueError: the method does not suit the decoder, bases are missing or not its own, sizes do not fit.
        TypeError: a dtype that is not floating, or that JAX would not hold (float64 without x64).
    """
    method = as_method(method)
    if isinstance(prompt, int) and prompt < 1:
        raise ValueError(f"prompt={prompt}: must be at least 1; what is appended needs something to be appended to")
    method.validate(spec)
    if method.attends_codes:
        raise ValueError("prefill='compressed': a decoder of one's own attends within its prompts itself; allowed is "
                         "prefill=exact")
    layout = layout_of(spec, rows_together(mesh), prompt, capacity, block_of(method, block), dtype, mesh)
    groups = method.layer_groups(spec)
    windows = (tuple(spec.windows[layer] for layer in group) for group in groups)
    known = bases_of_group(method, spec, replicate(layout.mesh, bases))
    layouts = (layout.of_group(group) for group in groups)
    return tuple(LayerPlan(own, method, *of_group) for own, *of_group in zip(known, layouts, windows, strict=True))


def prefill_layer(
    plan: LayerPlan, taps: Taps | Sequence[Taps], lengths: jax.Array | np.ndarray | None = None, *, goes_on: bool = False
) -> LayerCache:
    """The compressed prompt of a layer, which has attended to itself exactly before.

    Args:
        taps: of any number of prompts, T = `layout.prompt` at positions 0 to T - 1; of each layer where the plan is of
            several.
        lengths: int32 `[B]` in 1..`layout.prompt`, of the whole prompts; None means that no row is padded.
        goes_on: the taps are of the prompts' first T tokens, any T up to `layout.prompt`: `layer_chunks.attend_chunk`
            reads on, `end_prompt` says where it ends.

    Raises:
        ValueError: taps or lengths of other shapes than the plan's.
    """
    given = (taps,) if isinstance(taps, Taps) else tuple(taps)
    if len(given) != len(plan.windows):
        raise ValueError(f"taps of {len(given)} layers: this plan is of {len(plan.windows)} layers that share a store")
    layout = _of_rows(plan.layout, given[0].k.shape[0])
    tokens = min(given[0].k.shape[1], layout.prompt) if goes_on else layout.prompt
    for one in given:
        check_taps(layout, one, tokens)
    lengths = checked_lengths(lengths, layout.batch, layout.prompt)
    limit, begun = machine_of(plan.method).limit(layout, lengths), jnp.minimum(lengths, tokens)
    group = compress_group(plan.method, layout, plan.bases, tuple(one._replace(x=None) for one in given), begun, goes_on)
    return LayerCache(group, begun, limit, jnp.int32(0), plan.method, layout, goes_on=goes_on)


def append_and_attend(
    plan: LayerPlan, cache: LayerCache, taps: Taps, counts: jax.Array | np.ndarray | None = None
) -> tuple[LayerCache, jax.Array]:
    """Append T <= `layout.block` tokens to a layer and attend from them to all that it holds.

    Where no slot is left for them (`refresh_layer` was forgotten, the capacity is used up) the answer of a row is NaN.

    Args:
        cache: donated where the call is compiled.
        taps: `[B, T, ...]`, at `cache.positions(T)`.
        counts: int32 `[B]`, valid tokens of each row, which stand first; None means all.

    Returns:
        The cache, and the attended values of each query head, float32 `[B, T, N, D]`.

    Raises:
        ValueError: a cache of another plan or whose prompt goes on, taps or counts of other shapes.
    """
    check_plan(plan, cache)
    check_ended(cache)
    tokens = taps.k.shape[1]
    block = next_block(cache, tokens, counts)
    check_taps(cache.layout, taps, tokens)
    place = Place(cache.turn, plan.windows[cache.turn])
    group, out = _step(cache.method, cache.layout, place, plan.bases, cache.group, taps._replace(x=None),
                       block.positions, block.counts)
    cache = dataclasses.replace(cache, group=group, turn=(cache.turn + 1) % len(plan.windows))
    return with_block(cache, block) if cache.turn == 0 else cache, guard(block, out)


def refresh_layer(plan: LayerPlan, cache: LayerCache) -> LayerCache:
    """Periodic work of the method (flush, evict, move bases), after at most `layout.block` appended tokens.

    Raises:
        ValueError: a cache of another plan, whose prompt goes on, or between two layers of a group.
    """
    check_plan(plan, cache)
    check_ended(cache)
    if cache.turn:
        raise ValueError(f"refresh after layer {cache.turn} of a group of {len(plan.windows)}: append to all of them "
                         "first")
    group = refresh_group(cache.method, cache.layout, plan.bases, cache.group)
    return dataclasses.replace(refreshed(cache), group=group)


@functools.partial(jax.jit, static_argnames=("method", "layout", "place"), donate_argnames=("state",))
def _step(method, layout, place, bases, state, taps, positions, counts):
    state, partial = step_group(method, layout, place, bases, state, taps, positions, counts)
    return state, partial.out.astype(jnp.float32)


def check_plan(plan: LayerPlan, cache: LayerCache) -> None:
    """Raise ValueError unless the cache is of this plan, or of one for the same attention and method."""
    check_method(cache, plan.method)
    if (cache.layout.spec, cache.layout.window) != (plan.layout.spec, plan.layout.window):
        raise ValueError("this cache was made for another decoder, or another of its layers: its attention differs")


def check_ended(cache: LayerCache) -> None:
    """Raise ValueError where more chunks of the prompt are to come."""
    if cache.goes_on:
        raise ValueError("the prompt of this cache goes on: `end_prompt` says where it ends")


def _of_rows(layout: Layout, rows: int) -> Layout:
    if layout.mesh is not None:
        check_mesh(layout.mesh, layout.spec, rows)
    return dataclasses.replace(layout, batch=rows)


def check_taps(layout: Layout, taps: Taps, tokens: int) -> None:
    """Raise ValueError where the shapes are not those of the layout."""
    spec = layout.spec
    for name, heads in (("q", spec.q_heads), ("k", spec.kv_heads), ("k_pre", spec.kv_heads), ("v", spec.kv_heads)):
        shape, wanted = getattr(taps, name).shape, (layout.batch, tokens, heads, spec.head_dim)
        if shape != wanted and (spec.latent is None or shape[:2] != wanted[:2]):
            raise ValueError(f"taps.{name} {shape}: must be {wanted} [batch, tokens, heads, head_dim]")
    found = None if taps.sink_logits is None else taps.sink_logits.shape
    wanted = (spec.q_heads,) if spec.sink_logits else None
    if found != wanted:
        raise ValueError(f"taps.sink_logits {found}: must be {wanted} of a spec with sink_logits={spec.sink_logits}")
