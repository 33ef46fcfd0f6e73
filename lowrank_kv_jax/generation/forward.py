"""Running a model through a compressed cache: prefill, and appending tokens to what was prefilled.

The functions here are pure and traceable. Called outside of `jax.jit` they run layer by layer, each layer one compiled
program that all layers share: compilation takes seconds, whatever the depth. Under `jax.jit` (as `generate` does for
decoding) the whole model is one program.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.checks.arrays import array_of
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.generation.chunks import read_chunk, settled
from lowrank_kv_jax.generation.groups import compress_group, given, refresh_group, taken_back
from lowrank_kv_jax.generation.layers import (
    embed_tokens,
    last_hidden,
    last_logits,
    layer_extend,
    layer_prefill,
    layer_prefill_coded,
    layer_prefill_twice,
    logits_of,
    together,
)
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.cache import Cache, check_method, check_spec
from lowrank_kv_jax.method.filling import checked_lengths, guard, next_block, refreshed, with_block
from lowrank_kv_jax.method.layout import DEFAULT_BLOCK, layout_of
from lowrank_kv_jax.method.part import block_of
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.selections.reread import CHUNK, prompt_twice
from lowrank_kv_jax.storage.sharding import check_weights, replicate, shard_rows

MOST_ID = 2**31 - 1

# ---- the model --------------------------------------------------------------------------------------------------


def make_layout(
    config: ModelConfig, batch: int, prompt: int, capacity: int | None, block: int = DEFAULT_BLOCK, dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Layout:
    """A checked `Layout`; see `layout_of`."""
    return layout_of(config.attention, batch, prompt, capacity, block, dtype, mesh)


def prefill(
    method: Part | str, config: ModelConfig, params: Any, tokens: Int[jax.Array | np.ndarray, "B S"],
    lengths: Int[jax.Array | np.ndarray, " B"] | None = None, *, bases: Any = None, capacity: int | None = None,
    block: int | None = None, dtype: Any = None, mesh: jax.sharding.Mesh | None = None, chunk: int | None = None,
) -> tuple[Cache, Float[jax.Array, "B V"]]:
    """Attend exactly within the prompts and compress, group of layers by group.

    At most one group's exact keys and values are alive at any time; with `chunk`, those of a chunk.

    Args:
        method: how to compress, or its spec (see `parse_method`).
        config, params: the model (`LoadedModel.config`, `LoadedModel.params`).
        tokens: int32 `[B, S]`, rows padded on the right.
        lengths: int32 `[B]` in 1..S; None means that no row is padded.
        bases: from `calibrate`, where the method needs them.
        capacity: longest sequence, S included.
        block: tokens that may be appended between two calls of `refresh`; None: as many as the method asks for (32,
            `transform` 16).
        dtype: of the cache, any floating one, `default_cache_dtype()` (bfloat16) by default; see `cache_dtype`.
        mesh: lay the cache out over these devices, rows over "data", kv heads over "model" and slots of stored tokens
            over "tokens"; the weights must lie on the same mesh (`load_model(..., mesh=mesh)`).
        chunk: read so many tokens at a time, 2048 say, and compress between them: a chunk attends exactly to itself, and
            to what the cache holds of those before it, so that memory does not grow with the prompt beyond the cache. A
            prompt of one chunk is read as without. None: the whole prompt attends to itself exactly.

    Returns:
        The cache, and float32 logits `[B, V]` at the last token of each row.

    Raises:
        ValueError: shapes, lengths, capacity, method or bases do not fit, see `make_layout`; weights on other devices.
    """
    method = as_method(method)
    if chunk is not None:
        check_int("chunk", chunk, 1)
    tokens, lengths = _checked_tokens(tokens, lengths, config.vocab_size)
    batch, width = tokens.shape
    layout = make_layout(config, batch, width, capacity, block_of(method, block), dtype, mesh)
    method.validate(config.attention)
    check_weights(layout.mesh, params)
    bases, first = replicate(layout.mesh, bases), width if chunk is None else min(chunk, width)
    tokens, lengths = shard_rows(layout.mesh, tokens, lengths)
    whole = first == width
    if method.rereads and not whole:
        check_context(config, width, min(first, CHUNK))
    cache, last = begin_prefill(
        method, config, params, layout, tokens[:, :first], lengths, bases=bases, goes_on=not whole)
    for begin in range(first, width, first):
        piece = tokens[:, begin : begin + first]
        piece = jnp.pad(piece, ((0, 0), (0, first - piece.shape[1])))  # one program for all chunks
        counts = jnp.clip(lengths - begin, 0, first)
        cache, last = read_chunk(method, config, params, cache, piece, counts, last, bases=bases, of_prompt=True)
    return cache if whole else settled(cache, first), logits_of(config, params, last)[:, 0]


def begin_prefill(
    method: Part, config: ModelConfig, params: Any, layout: Layout, tokens: Int[jax.Array, "B T"],
    lengths: Int[jax.Array, " B"], *, bases: Any = None, goes_on: bool = False,
) -> tuple[Cache, Float[jax.Array, "B 1 H"]]:
    """Prefill prompts, or the first T tokens of prompts that go on; unchecked.

    Args:
        layout: of the cache, with room for the whole prompts.
        lengths: int32 `[B]`, of the whole prompts.
        goes_on: whether `generation.chunks.read_chunk` reads the rest, before `settled`.

    Returns:
        The cache, and the residual stream `[B, 1, H]` at each row's last token.
    """
    limit, begun = machine_of(method).limit(layout, lengths), jnp.minimum(lengths, tokens.shape[1])
    bases = bases_of_group(method, config.attention, bases)
    states, x = _compressed(method, config, params, layout, bases, tokens, begun, goes_on)
    return Cache(states, begun, limit, jnp.int32(0), method, layout), last_hidden(x, begun)


def _compressed(method, config, params, layout: Layout, bases, tokens, lengths, goes_on: bool):
    """The states of all groups, and the residual stream."""
    reading = start_reading(config, params, tokens, lengths, twice=method.rereads)
    states = []
    for group, group_bases in zip(method.layer_groups(config.attention), bases, strict=True):
        taps = []
        for layer in group:
            own = Coding(method, layout.of_layer(layer), group_bases, lengths)
            reading, tap = read_layer(config, params, layer, reading, own)
            taps.append(tap)
        state = compress_group(method, layout.of_group(group), group_bases, tuple(taps), lengths, goes_on)
        # Without the barrier a compiler may compress all groups at the end and keep every exact K/V until then.
        reading, state = together(reading, state)
        states.append(state)
    return tuple(states), reading.x[:, : tokens.shape[1]]


class Reading(NamedTuple):
    """A prompt on its way through the layers: the residual stream `[B, T, H]` and positions `[B, T]` of its tokens.

    Where it is read twice, T is twice its width, the second half being a copy; `lengths` `[B]` is None otherwise.
    """

    x: jax.Array
    positions: jax.Array
    lengths: jax.Array | None


class Coding(NamedTuple):
    """What a layer's prompt `[B]` of `lengths` is coded by; read of methods whose prompts attend to their codes."""

    method: Part
    layout: Layout
    bases: Any
    lengths: jax.Array


def start_reading(
    config: ModelConfig, params: Any, tokens: Int[jax.Array, "B S"], lengths: Int[jax.Array, " B"], *, twice: bool
) -> Reading:
    """A prompt `[B, S]` before the first layer.

    Raises:
        ValueError: to be read twice, it outgrows the model's context.
    """
    width = tokens.shape[1]
    if not twice:
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        return Reading(embed_tokens(config, params, tokens), positions, None)
    check_context(config, width, min(width, CHUNK))
    tokens, positions = prompt_twice(tokens, lengths)
    return Reading(embed_tokens(config, params, tokens, positions), positions, lengths)


def check_context(config: ModelConfig, width: int, copies: int) -> None:
    """Raise ValueError where a prompt of `width` tokens, of which so many are read twice at a time, has no positions."""
    if width + copies > config.context:
        raise ValueError(f"a prompt of {width} tokens, read twice, needs {width + copies} positions; the model's context "
                         f"has {config.context}")


def read_layer(
    config: ModelConfig, params: Any, layer: int, reading: Reading, coding: Coding | None = None
) -> tuple[Reading, Taps]:
    """A layer over a prompt: what goes on to the next one, and the prompt's taps.

    It attends exactly, or as `coding` says.
    """
    config, window, weights = config.by_layer[layer], config.windows[layer], params["layers"][layer]
    x, positions, lengths = reading
    mesh = None if coding is None else coding.layout.mesh
    if coding is not None and coding.method.attends_codes:
        method, layout, bases, known = coding
        x, taps = layer_prefill_coded(
            config, window, method, layout, weights, bases, x, positions, known, lengths is not None)
    elif lengths is None:
        x, taps = layer_prefill(config, window, weights, x, positions, mesh)
    else:
        x, taps = layer_prefill_twice(config, window, weights, x, positions, lengths, mesh)
    return reading._replace(x=x), taps


def extend(
    method: Part | str, config: ModelConfig, params: Any, cache: Cache, tokens: Int[jax.Array | np.ndarray, "B T"],
    counts: Int[jax.Array | np.ndarray, " B"] | None = None, *, bases: Any = None, all_logits: bool = False,
) -> tuple[Cache, Float[jax.Array, "B V"] | Float[jax.Array, "B T V"]]:
    """Append a block of T <= `block` tokens (a question, a turn, a text to score) and attend through the cache.

    Call `refresh` when `block` slots are used up. Going beyond them or beyond the capacity makes the logits NaN: inside
    of jit nothing louder is possible, and wrong numbers must not pass for right ones. So do ids outside of the vocabulary
    and counts beyond T.

    Args:
        cache: donated where the call is compiled; `fork` it first to keep it.
        tokens: int32 `[B, T]`, padded on the right.
        counts: int32 `[B]`, valid tokens of each row; None means all.
        all_logits: logits `[B, T, V]` of every token instead of `[B, V]` of each row's last.

    Returns:
        The cache and float32 logits.
    """
    method, tokens = as_method(method), array_of("tokens", tokens)
    check_method(cache, method)
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected integers [rows, tokens], got shape {tokens.shape}")
    if tokens.size and not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: expected integers [rows, tokens], got {tokens.dtype}{tokens.shape}")
    if isinstance(tokens, np.ndarray):  # JAX would keep the low 32 bits: an id beyond them is outside of any vocabulary
        tokens = np.clip(tokens, -1, MOST_ID).astype(np.int32)
    layout, (batch, width) = cache.layout, tokens.shape
    if batch != layout.batch or width > layout.block:
        raise ValueError(f"tokens {tokens.shape}: the cache takes {layout.batch} rows of at most {layout.block} tokens "
                         "between two refreshes")
    check_spec(cache, config.attention)
    bases = bases_of_group(method, config.attention, replicate(layout.mesh, bases))
    (tokens,) = shard_rows(layout.mesh, tokens)
    block, configs = next_block(cache, width, counts), config.by_layer
    x = embed_tokens(config, params, tokens, block.positions)
    states = []
    for group, group_bases, state in zip(method.layer_groups(config.attention), bases, cache.groups, strict=True):
        for index, layer in enumerate(group):
            shape, place = layout.of_layer(layer), Place(index, config.windows[layer])
            own = given(method, shape, place, state, x)
            x, after = layer_extend(
                configs[layer], method, shape, own.place, params["layers"][layer], group_bases, own.state, x,
                block.positions, block.counts, own.index,
            )
            state = taken_back(state, place, own, after)
        states.append(state)
    logits = logits_of(config, params, x) if all_logits else last_logits(config, params, x, block.counts)
    return dataclasses.replace(with_block(cache, block), groups=tuple(states)), guard(block, logits)


def decode_step(
    method: Part | str, config: ModelConfig, params: Any, cache: Cache, token: Int[jax.Array | np.ndarray, " B"], *,
    bases: Any = None, active: Bool[jax.Array | np.ndarray, " B"] | None = None,
) -> tuple[Cache, Float[jax.Array, "B V"]]:
    """Append one token `[B]` to every row; returns the cache and logits `[B, V]`.

    Args:
        active: bool `[B]`; rows that are not active keep their cache as it is.
    """
    token = array_of("token", token)
    if token.ndim != 1:
        raise ValueError(f"token: expected one for each row, [rows], got shape {token.shape}")
    counts = None if active is None else array_of("active", active).astype(jnp.int32)
    return extend(method, config, params, cache, token[:, None], counts, bases=bases)


def refresh(method: Part | str, cache: Cache, *, bases: Any = None) -> Cache:
    """Periodic work of the method (flush, evict, move bases), after at most `layout.block` appended tokens."""
    method = as_method(method)
    check_method(cache, method)
    layout = cache.layout
    bases = bases_of_group(method, layout.spec, replicate(layout.mesh, bases))
    layouts = (layout.of_group(group) for group in method.layer_groups(layout.spec))
    states = (refresh_group(method, *of_group) for of_group in zip(layouts, bases, cache.groups, strict=True))
    return dataclasses.replace(refreshed(cache), groups=tuple(states))


def _checked_tokens(tokens, lengths, vocab_size: int):
    tokens = array_of("tokens", tokens)
    if tokens.ndim != 2 or tokens.shape[1] == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: expected non-empty integers [batch, length], got {tokens.dtype}{tokens.shape}")
    if not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True):
        host = np.asarray(tokens)
        wrong = (host < 0) | (host >= vocab_size)
        if wrong.any():
            raise ValueError(f"tokens hold id {int(host[wrong][0])}: ids lie in 0..{vocab_size - 1}")
    return jnp.asarray(tokens, jnp.int32), checked_lengths(lengths, *tokens.shape)
