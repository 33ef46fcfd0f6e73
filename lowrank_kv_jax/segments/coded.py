"""Tokens kept as coefficients in a basis that lives outside the segment."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.cache_dtype import narrow
from lowrank_kv_jax.codecs.packed import PackedTokens
from lowrank_kv_jax.codecs.quantised import (
    COEFFICIENTS,
    QuantisedTokens,
    Tile,
    append_tokens,
    empty_tokens,
    map_tokens,
)
from lowrank_kv_jax.pallas_kernels.coefficient_attention import CachedTokens
from lowrank_kv_jax.positions import PerHead, Runs
from lowrank_kv_jax.state import leaf, state


@state
class Coded:
    """Coefficients of keys and values, as arrays or in quantised storage.

    Attributes:
        k: `[B, J, S, Rk]`.
        v: `[B, J', S, Rv]`.
        length: int32 `[B]`, tokens held by each row.
        positions: a gap before the first token and one where the prompt's own exact tokens are missing; one by one
            where they were selected.
    """

    k: jax.Array | QuantisedTokens | PackedTokens = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    v: jax.Array | QuantisedTokens = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs | PerHead


def empty_coded(
    batch: int, k_shape: tuple[int, int], v_shape: tuple[int, int], size: int, dtype, bits: int | None = None,
    k_tile: Tile = COEFFICIENTS, v_tile: Tile = COEFFICIENTS,
) -> Coded:
    """An empty segment of `size` slots; shapes are (heads, rank) of the coefficients.

    Args:
        bits: 2, 4 or 8 for quantised storage, whose size is rounded up to whole tiles; None stores `dtype`.
        k_tile, v_tile: what shares a scale there.
    """
    none = jnp.zeros((batch,), jnp.int32)
    gaps = jnp.zeros((batch, 2), jnp.int32)
    if bits is not None:
        most = max(k_tile.tokens, v_tile.tokens)
        size = -(-size // most) * most
    k, v = (
        empty_tokens((batch, heads, size, rank), bits, dtype, tile)
        for (heads, rank), tile in ((k_shape, k_tile), (v_shape, v_tile))
    )
    return Coded(k, v, none, Runs(gaps, gaps))


def hold(segment: Coded, k: jax.Array, v: jax.Array, counts: jax.Array, positions: Runs | PerHead) -> Coded:
    """Fill an empty segment with the first `counts[b]` of T coefficients `[B, J, T, R]`."""
    return Coded(fill_tokens(segment.k, k, counts), fill_tokens(segment.v, v, counts), counts, positions)


def fill_tokens(stored: jax.Array | QuantisedTokens, x: jax.Array, counts: jax.Array) -> jax.Array | QuantisedTokens:
    """An empty buffer with the first `counts[b]` of T tokens `[B, J, T, R]`, as many of them as it has slots."""
    size = min(x.shape[2], stored.shape[2])
    if not isinstance(stored, QuantisedTokens):
        return stored.at[:, :, :size].set(narrow(x[:, :, :size], stored.dtype))
    whole = -(-size // stored.tile.tokens) * stored.tile.tokens
    x = jnp.pad(x[:, :, :size].astype(jnp.float32), ((0, 0), (0, 0), (0, whole - size), (0, 0)))
    valid = jnp.arange(whole)[None] < counts[:, None]
    touch = jnp.ones((x.shape[0], whole // stored.tile.tokens), bool)
    return stored.write_block(0, x, valid, touch)


def append(segment: Coded, k: jax.Array, v: jax.Array, counts: jax.Array) -> Coded:
    """Append the first `counts[b]` of T coefficients `[B, J, T, R]`; O(T)."""
    return Coded(
        append_tokens(segment.k, k, segment.length, counts),
        append_tokens(segment.v, v, segment.length, counts),
        segment.length + counts,
        segment.positions,
    )


def cached_tokens(segment: Coded) -> CachedTokens:
    """The segment as the attention ops take it."""
    return CachedTokens(segment.k, segment.v, segment.length, segment.positions)


def transport(
    coefficients: jax.Array | QuantisedTokens, lengths: jax.Array, old: jax.Array, new: jax.Array
) -> jax.Array | QuantisedTokens:
    """Coefficients read in a basis that has moved: C <- C U_old^T U_new, `[B, J, S, R]`; bases `[B, J, W, R]`.

    What the old basis had kept and the new one does not is lost; nothing is silently reinterpreted. Block by block in
    place up to the longest of `lengths` `[B]`: O(length) work, and no second copy of the cache. A row whose basis has not
    moved keeps its coefficients. Quantised ones of a row that did are quantised anew, which adds half a step of error
    each time: negligible in 8 bits, not in 4 or 2.
    """
    old, new = old.astype(jnp.float32), new.astype(jnp.float32)
    # Bases are rounded to the dtype that they are stored in, after which U^T U is not quite 1, an error that would grow
    # with every refresh: the least-squares coefficients divide by it, here by one Newton step.
    correction = 2 * jnp.eye(new.shape[-1]) - jnp.einsum("bjwr,bjwp->bjrp", new, new)
    move = jnp.einsum("bjwr,bjwp,bjpq->bjrq", old, new, correction)
    moved = jnp.broadcast_to(jnp.any(old != new, axis=(1, 2, 3)), lengths.shape)
    return map_tokens(coefficients, lengths, lambda x: jnp.einsum("bjsr,bjrp->bjsp", x.astype(jnp.float32), move), moved)
