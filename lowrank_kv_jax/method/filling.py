"""How full a cache is, and which of its rows can still be trusted.

Slots that are not there cannot be written, and what has not been refreshed in time is lost. Inside of jit nothing can be
raised; what such a row answers becomes NaN, for wrong numbers must not pass for right ones.
"""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowrank_kv_jax.checks.arrays import array_of
from lowrank_kv_jax.storage.sharding import shard_rows

_Filled = TypeVar("_Filled", bound=Any)
"""Has `length` int32 `[B]`, `limit` int32 `[B]`, `pending` int32 scalar and a `layout`; see `method.cache.Cache`."""


class Block(NamedTuple):
    """A block of T new tokens.

    Attributes:
        counts: int32 `[B]`, how many of them count.
        positions: int32 `[B, T]`.
        fits: bool `[B]`, whether there is room for them and the counts were no more than there are tokens.
    """

    counts: jax.Array
    positions: jax.Array
    fits: jax.Array


def next_block(cache: Any, tokens: int, counts: jax.Array | np.ndarray | None) -> Block:
    """The next `tokens` tokens of a cache.

    Raises:
        ValueError: counts that are not integers `[B]`, or NumPy ones out of range; more tokens than a block has.
    """
    most = cache.layout.block
    if not 1 <= tokens <= most:
        raise ValueError(f"{tokens} tokens at once: the cache takes 1..{most} between two refreshes (block)")
    return _next(cache, tokens, counts, cache.pending + tokens <= most)


def next_chunk(cache: Any, tokens: int, counts: jax.Array | np.ndarray | None) -> Block:
    """The next `tokens` tokens of a cache that takes them as a chunk: any number, but only where it is refreshed.

    Raises:
        ValueError: counts that are not integers `[B]`, or NumPy ones out of range.
    """
    return _next(cache, tokens, counts, cache.pending == 0)


def _next(cache: Any, tokens: int, counts: jax.Array | np.ndarray | None, ready: jax.Array) -> Block:
    layout = cache.layout
    given = jnp.full((layout.batch,), tokens, jnp.int32)
    given = given if counts is None else checked_counts(counts, layout.batch, tokens)
    (given,) = shard_rows(layout.mesh, given)
    held = jnp.clip(given, 0, tokens)
    positions = cache.length[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    return Block(held, positions, (cache.length + held <= cache.limit) & ready & (held == given))


def with_block(cache: _Filled, block: Block) -> _Filled:
    """The cache once it holds the block."""
    length, pending = cache.length + block.counts, cache.pending + block.positions.shape[1]
    return dataclasses.replace(cache, length=length, pending=pending)


def refreshed(cache: _Filled) -> _Filled:
    """The cache with its block free again; one that was fed beyond it has lost tokens and stays marked."""
    pending, most = cache.pending, cache.layout.block
    return dataclasses.replace(cache, pending=jnp.where(pending > most, pending, 0))


def guard(block: Block, answer: jax.Array) -> jax.Array:
    """An answer `[B, ...]`, NaN in the rows where the block did not fit."""
    return jnp.where(block.fits.reshape(-1, *(1,) * (answer.ndim - 1)), answer, jnp.nan)


def checked_counts(counts: Any, batch: int, width: int) -> jax.Array:
    """int32 `[B]`; that they lie in 0..width is only checked of NumPy arrays: reading others would stop dispatch."""
    counts = array_of("counts", counts)
    if counts.shape != (batch,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"counts: expected integers, one for each of the {batch} rows, got {counts.dtype}{counts.shape}")
    if isinstance(counts, np.ndarray) and ((counts < 0) | (counts > width)).any():
        row = int(np.argmax((counts < 0) | (counts > width)))
        raise ValueError(f"counts[{row}]={int(counts[row])}: {width} tokens were given, so it must lie in 0..{width}")
    return jnp.asarray(counts, jnp.int32)


def checked_lengths(lengths: Any, batch: int, width: int) -> jax.Array:
    """Lengths of prompts, int32 `[B]`; None means that no row is padded.

    Raises:
        ValueError: not integers `[B]`, or outside of 1..width where they can be read.
    """
    if lengths is None:
        return jnp.full((batch,), width, jnp.int32)
    lengths = array_of("lengths", lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths: expected integers, one for each of the {batch} rows, got "
                         f"{lengths.dtype}{lengths.shape}")
    if not isinstance(lengths, Tracer):
        host = np.asarray(lengths)
        if (host < 1).any() or (host > width).any():
            row = int(np.argmax((host < 1) | (host > width)))
            raise ValueError(f"lengths[{row}]={int(host[row])}: every row needs 1..{width} tokens")
    return jnp.asarray(lengths, jnp.int32)
