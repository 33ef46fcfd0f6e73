"""Running a model through a compressed cache: prefill, and appending tokens to what was prefilled.

The functions here are pure and traceable. Called outside of `jax.jit` they run layer by layer, each layer one compiled
program that all layers share: compilation takes seconds, whatever the depth. Under `jax.jit` (as `generate` does for
decoding) the whole model is one program.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.method.cache import Cache, check_method
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import block_output, block_prefill, block_taps, embed, unembed
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention
from lowrank_kv_jax.selections.reread import CHUNK, reread_attention, reread_positions
from lowrank_kv_jax.storage.bits import hold_bits, like_before
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.sharding import check_mesh, constrain, replicate, shard_rows

DEFAULT_BLOCK = 32


# ---- one layer, jitted: shared by all layers of a model ---------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("config", "window"))
def layer_prefill(config: ModelConfig, window: int | None, layer: Any, x: jax.Array, positions: jax.Array):
    """Exact causal attention within the prompt: the residual stream after the layer and its taps."""
    attend = functools.partial(causal_attention, scale=config.attention.scale, window=window)
    return block_prefill(config, layer, x, positions, attend)


@functools.partial(jax.jit, static_argnames=("config", "window"))
def layer_prefill_twice(
    config: ModelConfig, window: int | None, layer: Any, x: jax.Array, positions: jax.Array, lengths: jax.Array
):
    """The same for a prompt `[B, S, H]` with a copy behind it, `[B, 2 S, H]`; taps of the prompt, with `reread`."""
    size, votes = x.shape[1] // 2, []

    def attend(q, k, v):
        first = causal_attention(*(y[:, :size] for y in (q, k, v)), scale=config.attention.scale, window=window)
        second, found = reread_attention(q[:, size:], k, v, lengths, scale=config.attention.scale, window=window)
        votes.append(found)
        return jnp.concatenate([first, second], axis=1)

    x, taps = block_prefill(config, layer, x, positions, attend)
    return x, taps.part(slice(size))._replace(reread=votes[0])


@functools.partial(jax.jit, static_argnames=("method", "layout"))
def compress_group(method: Part, layout: Layout, bases: Any, taps: tuple[Taps, ...], lengths: jax.Array):
    """The compressed state of a group of layers whose prompt was prefilled."""
    method = machine_of(method)
    empty = constrain(layout.mesh, method.init(layout, bases))
    return constrain(layout.mesh, hold_bits(method.compress(layout, bases, empty, taps, lengths)))


@functools.partial(jax.jit, static_argnames=("config", "method", "layout", "place"), donate_argnames=("state",))
def layer_extend(config, method, layout, place, layer, bases, state, x, positions, counts):
    """Append T tokens to one layer's cache and attend through it."""
    method, taps = machine_of(method), block_taps(config, layer, x, positions)
    before = state
    state = method.append(layout, bases, state, taps, counts, positions, place)
    partial = method.attend(layout, bases, state, taps.q, positions, place)
    state = method.observe(layout, bases, state, taps.q, partial.lse, positions, place)
    return block_output(config, layer, x, partial.out), constrain(layout.mesh, like_before(before, state))


@functools.partial(jax.jit, static_argnames=("method", "layout"), donate_argnames=("state",))
def refresh_group(method, layout, bases, state):
    refreshed = machine_of(method).refresh(layout, bases, lay_out(state, "rows"))
    return constrain(layout.mesh, like_before(state, lay_out(refreshed, layout.tokens)))


embed_tokens = jax.jit(embed, static_argnums=0)
logits_of = jax.jit(unembed, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def last_logits(config, params, x, counts):
    """Logits `[B, V]` at the last valid token of each row of `x` `[B, T, H]`."""
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return unembed(config, params, last)[:, 0]


# ---- the model --------------------------------------------------------------------------------------------------


def make_layout(
    config: ModelConfig, batch: int, prompt: int, capacity: int | None, block: int = DEFAULT_BLOCK, dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Layout:
    """A checked `Layout`; `capacity` defaults to the prompt and one block more, `dtype` to `default_cache_dtype()`.

    Raises:
        ValueError: empty prompt, capacity below the prompt or above the model's context, block below 1.
        TypeError: a dtype that is not floating.
    """
    capacity = prompt + block if capacity is None else capacity
    dtype = jnp.dtype(default_cache_dtype() if dtype is None else dtype)
    if batch < 1 or prompt < 0:
        raise ValueError(f"batch={batch}, prompt={prompt}: must be at least 1 and 0")
    if block < 1:
        raise ValueError(f"block={block}: must be at least 1")
    if capacity < max(prompt, 1):
        raise ValueError(f"capacity={capacity}: the prompt has {prompt} tokens; capacity must be at least that")
    if capacity > config.context:
        raise ValueError(f"capacity={capacity}: the model's context is {config.context} tokens")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"cache dtype {dtype.name}: must be a floating dtype")
    mesh = None if mesh is None else check_mesh(mesh, config.attention, batch)
    return Layout(config.attention, batch, prompt, capacity, min(block, capacity), dtype.name, mesh)


def prefill(
    method: Part, config: ModelConfig, params: Any, tokens: jax.Array, lengths: jax.Array | None = None, *,
    bases: Any = None, capacity: int | None = None, block: int = DEFAULT_BLOCK, dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Cache, jax.Array]:
    """Attend exactly within the prompts and compress, group of layers by group.

    At most one group's exact keys and values are alive at any time.

    Args:
        method: how to compress.
        config, params: the model (`LoadedModel.config`, `LoadedModel.params`).
        tokens: int32 `[B, S]`, rows padded on the right.
        lengths: int32 `[B]` in 1..S; None means that no row is padded.
        bases: from `calibrate`, where the method needs them.
        capacity: longest sequence, S included.
        block: tokens that may be appended between two calls of `refresh`.
        dtype: of the cache, any floating one, `default_cache_dtype()` (bfloat16) by default; see `cache_dtype`.
        mesh: lay the cache out over these devices, rows over "data" and kv heads over "model"; the weights must lie on
            the same mesh (`load_model(..., mesh=mesh)`).

    Returns:
        The cache, and float32 logits `[B, V]` at the last token of each row.

    Raises:
        ValueError: shapes, lengths, capacity, method or bases do not fit; see `make_layout`.
    """
    tokens, lengths = _checked_tokens(tokens, lengths, config.vocab_size)
    batch, width = tokens.shape
    layout = make_layout(config, batch, width, capacity, block, dtype, mesh)
    method.validate(config.attention)
    bases = bases_of_group(method, config.attention, replicate(layout.mesh, bases))
    tokens, lengths = shard_rows(layout.mesh, tokens, lengths)
    reading = start_reading(config, params, tokens, lengths, twice=method.rereads)
    states = []
    for group, group_bases in zip(method.layer_groups(config.attention), bases, strict=True):
        taps = []
        for layer in group:
            reading, tap = read_layer(config, params, layer, reading)
            taps.append(tap)
        state = compress_group(method, layout, group_bases, tuple(taps), lengths)
        # Without the barrier a compiler may compress all groups at the end and keep every exact K/V until then.
        reading, state = _together(reading, state)
        states.append(state)
    cache = Cache(  # its own copy of the lengths: the cache is donated, the caller's array is not
        tuple(states), jnp.copy(lengths), machine_of(method).limit(layout, lengths), jnp.int32(0), method, layout
    )
    return cache, last_logits(config, params, reading.x[:, :width], lengths)


class Reading(NamedTuple):
    """A prompt on its way through the layers: the residual stream `[B, T, H]` and positions `[B, T]` of its tokens.

    Where it is read twice, T is twice its width, the second half being a copy; `lengths` `[B]` is None otherwise.
    """

    x: jax.Array
    positions: jax.Array
    lengths: jax.Array | None


def start_reading(config: ModelConfig, params: Any, tokens: jax.Array, lengths: jax.Array, *, twice: bool) -> Reading:
    """A prompt `[B, S]` before the first layer.

    Raises:
        ValueError: to be read twice, it outgrows the model's context.
    """
    width = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    if not twice:
        return Reading(embed_tokens(config, params, tokens), positions, None)
    needed = width + min(width, CHUNK)
    if needed > config.context:
        raise ValueError(f"a prompt of {width} tokens, read twice, needs {needed} positions; the model's context has "
                         f"{config.context}")
    positions = jnp.concatenate([positions, reread_positions(lengths, width)], axis=1)
    tokens = jnp.concatenate([tokens, tokens], axis=1)
    return Reading(embed_tokens(config, params, tokens, positions), positions, lengths)


def read_layer(config: ModelConfig, params: Any, layer: int, reading: Reading) -> tuple[Reading, Taps]:
    """A layer over a prompt, exactly: what goes on to the next one, and the prompt's taps."""
    window, weights, (x, positions, lengths) = config.windows[layer], params["layers"][layer], reading
    if lengths is None:
        x, taps = layer_prefill(config, window, weights, x, positions)
    else:
        x, taps = layer_prefill_twice(config, window, weights, x, positions, lengths)
    return reading._replace(x=x), taps


def extend(
    method: Part, config: ModelConfig, params: Any, cache: Cache, tokens: jax.Array,
    counts: jax.Array | None = None, *, bases: Any = None, all_logits: bool = False,
) -> tuple[Cache, jax.Array]:
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
    check_method(cache, method)
    if tokens.ndim != 2:
        raise ValueError(f"tokens: expected integers [rows, tokens], got shape {tokens.shape}")
    layout, (batch, width) = cache.layout, tokens.shape
    if batch != layout.batch or width > layout.block:
        raise ValueError(f"tokens {tokens.shape}: the cache takes {layout.batch} rows of at most {layout.block} tokens "
                         "between two refreshes")
    if config.attention != layout.spec:
        raise ValueError("this cache was made for another model: its attention differs")
    bases = bases_of_group(method, config.attention, replicate(layout.mesh, bases))
    given = jnp.full((batch,), width, jnp.int32) if counts is None else _checked_counts(counts, batch, width)
    tokens, given = shard_rows(layout.mesh, tokens, given)
    counts = jnp.clip(given, 0, width)
    positions = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)
    x = embed_tokens(config, params, tokens, positions)
    states = []
    for group, group_bases, state in zip(method.layer_groups(config.attention), bases, cache.groups, strict=True):
        for index, layer in enumerate(group):
            place = Place(index, config.windows[layer])
            x, state = layer_extend(
                config, method, layout, place, params["layers"][layer], group_bases, state, x, positions, counts
            )
        states.append(state)
    logits = logits_of(config, params, x) if all_logits else last_logits(config, params, x, counts)
    fits = (cache.length + counts <= cache.limit) & (cache.pending + width <= layout.block) & (counts == given)
    logits = jnp.where(fits.reshape(-1, *(1,) * (logits.ndim - 1)), logits, jnp.nan)
    cache = dataclasses.replace(
        cache, groups=tuple(states), length=cache.length + counts, pending=cache.pending + width
    )
    return cache, logits


def decode_step(
    method: Part, config: ModelConfig, params: Any, cache: Cache, token: jax.Array, *, bases: Any = None,
    active: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Append one token `[B]` to every row; returns the cache and logits `[B, V]`.

    Args:
        active: bool `[B]`; rows that are not active keep their cache as it is.
    """
    if token.ndim != 1:
        raise ValueError(f"token: expected one for each row, [rows], got shape {token.shape}")
    counts = None if active is None else active.astype(jnp.int32)
    return extend(method, config, params, cache, token[:, None], counts, bases=bases)


def refresh(method: Part, cache: Cache, *, bases: Any = None) -> Cache:
    """Periodic work of the method (flush, evict, move bases), after at most `layout.block` appended tokens."""
    check_method(cache, method)
    bases = bases_of_group(method, cache.layout.spec, replicate(cache.layout.mesh, bases))
    states = (refresh_group(method, cache.layout, b, s) for b, s in zip(bases, cache.groups, strict=True))
    # a cache that was fed beyond its block has lost tokens: it stays marked, and its logits NaN
    pending = jnp.where(cache.pending > cache.layout.block, cache.pending, 0)
    return dataclasses.replace(cache, groups=tuple(states), pending=pending)


def _together(*trees):
    leaves, treedef = jax.tree.flatten(trees)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return trees
    return treedef.unflatten(jax.lax.optimization_barrier(leaves))


def _checked_counts(counts, batch: int, width: int) -> jax.Array:
    """int32 `[B]`; that they lie in 0..width is only checked of NumPy arrays: reading others would stop dispatch."""
    if counts.shape != (batch,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"counts: expected integers, one for each of the {batch} rows, got {counts.dtype}{counts.shape}")
    if isinstance(counts, np.ndarray) and ((counts < 0) | (counts > width)).any():
        row = int(np.argmax((counts < 0) | (counts > width)))
        raise ValueError(f"counts[{row}]={int(counts[row])}: {width} tokens were given, so it must lie in 0..{width}")
    return jnp.asarray(counts, jnp.int32)


def _checked_tokens(tokens, lengths, vocab_size: int):
    if tokens.ndim != 2 or tokens.shape[1] == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: expected non-empty integers [batch, length], got {tokens.dtype}{tokens.shape}")
    if not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True):
        host = np.asarray(tokens)
        wrong = (host < 0) | (host >= vocab_size)
        if wrong.any():
            raise ValueError(f"tokens hold id {int(host[wrong][0])}: ids lie in 0..{vocab_size - 1}")
    if lengths is None:
        return jnp.asarray(tokens, jnp.int32), jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths: expected integers, one for each of the {tokens.shape[0]} rows, got "
                         f"{lengths.dtype}{lengths.shape}")
    if not isinstance(lengths, Tracer):
        host = np.asarray(lengths)
        if (host < 1).any() or (host > tokens.shape[1]).any():
            row = int(np.argmax((host < 1) | (host > tokens.shape[1])))
            raise ValueError(f"lengths[{row}]={int(host[row])}: every row needs 1..{tokens.shape[1]} tokens")
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
