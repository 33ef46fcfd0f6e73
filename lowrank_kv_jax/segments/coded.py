"""Tokens kept as coefficients in a basis that lives outside the segment."""

import jax
import jax.numpy as jnp

from lowrank_kv_jax.pallas_kernels.blockwise import block_range, block_slots, slice_block
from lowrank_kv_jax.pallas_kernels.coefficient_attention import CachedTokens
from lowrank_kv_jax.positions import Runs
from lowrank_kv_jax.state import leaf, state, write_tokens


@state
class Coded:
    """Coefficients of keys and values.

    Attributes:
        k: `[B, J, S, Rk]`.
        v: `[B, J', S, Rv]`.
        length: int32 `[B]`, tokens held by each row.
        positions: a gap before the first token and one where the prompt's own exact tokens are missing.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    v: jax.Array = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs


def empty_coded(batch: int, k_shape: tuple[int, int], v_shape: tuple[int, int], size: int, dtype) -> Coded:
    """An empty segment of `size` slots; shapes are (heads, rank) of the coefficients."""
    none = jnp.zeros((batch,), jnp.int32)
    gaps = jnp.zeros((batch, 2), jnp.int32)
    return Coded(
        jnp.zeros((batch, k_shape[0], size, k_shape[1]), dtype),
        jnp.zeros((batch, v_shape[0], size, v_shape[1]), dtype),
        none,
        Runs(gaps, gaps),
    )


def hold(segment: Coded, k: jax.Array, v: jax.Array, counts: jax.Array, positions: Runs) -> Coded:
    """Fill an empty segment with the first `counts[b]` of T coefficients `[B, J, T, R]`."""
    size = min(k.shape[2], segment.k.shape[2])
    return Coded(
        segment.k.at[:, :, :size].set(k[:, :, :size].astype(segment.k.dtype)),
        segment.v.at[:, :, :size].set(v[:, :, :size].astype(segment.v.dtype)),
        counts,
        positions,
    )


def append(segment: Coded, k: jax.Array, v: jax.Array, counts: jax.Array) -> Coded:
    """Append the first `counts[b]` of T coefficients `[B, J, T, R]`; O(T)."""
    return Coded(
        write_tokens(segment.k, k, segment.length, counts),
        write_tokens(segment.v, v, segment.length, counts),
        segment.length + counts,
        segment.positions,
    )


def cached_tokens(segment: Coded) -> CachedTokens:
    """The segment as the attention ops take it."""
    return CachedTokens(segment.k, segment.v, segment.length, segment.positions)


def transport(
    coefficients: jax.Array, lengths: jax.Array, old: jax.Array, new: jax.Array
) -> jax.Array:
    """Coefficients read in a basis that has moved: C <- C U_old^T U_new, `[B, J, S, R]`; bases `[B, J, W, R]`.

    What the old basis had kept and the new one does not is lost; nothing is silently reinterpreted. Block by block in
    place up to the longest of `lengths` `[B]`: O(length) work, and no second copy of the cache.
    """
    move = jnp.einsum("bjwr,bjwp->bjrp", old.astype(jnp.float32), new.astype(jnp.float32))
    move = move.astype(coefficients.dtype)

    def step(i, buffer):
        start, _, fresh = block_slots(i, buffer.shape[2])
        block = slice_block(buffer, start)
        moved = jnp.where(fresh[:, None], jnp.einsum("bjsr,bjrp->bjsp", block, move), block)
        return jax.lax.dynamic_update_slice_in_dim(buffer, moved, start, axis=2)

    return jax.lax.fori_loop(*block_range(coefficients.shape[2], lengths), step, coefficients)
