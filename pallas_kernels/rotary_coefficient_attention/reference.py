"""The op in XLA, and the truth in tests.

Rebuilt keys lie tokens last, and the H = K / J heads that share coefficients inside of each channel, `[B, J, D, H, S]`:
a rotation then adds whole rows, which splits evenly over threads and transposes nothing, and a few queries meet all
heads of a layer in one product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.blockwise import blockwise_attention, spread_heads
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.turning import place_in_tile
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import tiles
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.block_angles import angles_of, block_angles
from lowrank_kv_jax.storage.backend import multiplies_16_bits
from lowrank_kv_jax.storage.basis import reconstruct
from lowrank_kv_jax.storage.block_reads import (
    block_for,
    block_slots,
    even_block,
    parts_are_tokens_last,
    slice_block,
    slice_parts,
    visible_blocks,
    visible_slots,
)

LARGEST = 2048  # tokens of a block: every block costs some time of its own, measured fastest on XLA's CPU backend
LARGEST_OF_CODES = 512  # of packed ones: as numbers a core's cache holds them
TILE = 128  # blocks are multiples of it
TOGETHER = 64  # queries times heads up to which one product with zeros in it is cheaper than one for each kv head


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis, key_mean=None, cap=None,
    origin=None
) -> AttnPartial:
    if origin is not None and tiles.pays(q, tokens, kv_heads, rope):
        return tiles.attend(q, tokens, key_basis, rope=rope, kv_heads=kv_heads, scale=scale, q_positions=q_positions,
                            causal=causal, window=window, key_mean=key_mean, origin=origin, cap=cap)
    batch, queries, heads, dim = q.shape
    groups, size = tokens.keys.shape[1:3]
    even = even_block(size, LARGEST_OF_CODES if parts_are_tokens_last(tokens.keys) else LARGEST, TILE)
    block = block_for(size, queries, batch * kv_heads * dim, even)
    few = value_basis is None and queries * heads <= TOGETHER and tokens.values.shape[1] <= groups
    few = few and jax.device_count() == 1  # heads that lie on several devices must not meet in one product
    shared = groups if few else kv_heads
    basis = _heads_inside(key_basis, kv_heads).astype(_product_dtype(q, tokens.keys, key_basis))
    basis = jnp.broadcast_to(basis, (batch, *basis.shape[-4:]))

    def read(i):
        start, slots, fresh = block_slots(i, size, block)
        mask, positions = visible_slots(tokens, slots, fresh, q_positions, causal, window, heads)
        if parts_are_tokens_last(tokens.keys):
            keys = _rebuild_from_columns(basis, slice_parts(tokens.keys, start, block), q.dtype)
        else:
            keys = _rebuild(basis, slice_block(tokens.keys, start, block), q.dtype)
        values = slice_parts(tokens.values, start, block)
        mean = None
        if key_mean is not None:
            mean = _heads_inside(key_mean.reshape(*key_mean.shape[:-2], groups, -1, 1), kv_heads).astype(q.dtype)
        if origin is not None and rope is not None:
            begins = positions - place_in_tile(positions, origin)
            keys = _rotate(keys, *angles_of(rope, begins))
            mean = mean if mean is None else _rotate(jnp.broadcast_to(mean, keys.shape), *angles_of(rope, positions))
        keys = keys if mean is None else keys + mean
        if rope is not None and origin is None:
            keys = _rotate(keys, *block_angles(rope, tokens.positions, positions, start))
        keys = keys if few else keys.swapaxes(2, 3)
        keys = keys.reshape(batch, shared, -1, keys.shape[-1])
        if value_basis is not None:
            values = slice_block(tokens.values, start, block).astype(q.dtype)
            values = (reconstruct(value_basis, values, kv_heads),)
        values = tuple(x if x.shape[1] == 1 else spread_heads(x, shared) for x in values)
        return keys, values, _of_heads(mask, shared, heads)

    value_dim = tokens.values.shape[-1] if value_basis is None else dim
    first, last = visible_blocks(tokens, q_positions, window, block)
    return blockwise_attention(
        _among_zeros(q, kv_heads, groups) if few else q, read, first, last, shared_heads=shared, value_dim=value_dim,
        scale=scale, cap=cap, tokens_last=True,
        values_last=value_basis is None and parts_are_tokens_last(tokens.values),
    )


def _product_dtype(q: jax.Array, keys: Any, basis: jax.Array) -> Any:
    """What keys are rebuilt in: the queries' dtype, or bfloat16, of which a CPU that has it multiplies twice as many.

    That loses nothing of coefficients and bases that are stored in it, nor of packed codes, which are whole numbers and a
    half; the bases of these, widened from 8 bits, are rounded by a 512th at most.
    """
    whole = q.dtype == jnp.float32 and getattr(keys, "dtype", None) == basis.dtype == jnp.bfloat16
    return jnp.bfloat16 if whole and multiplies_16_bits() else tiles.product_dtype(q, keys)


def _rebuild(basis: jax.Array, codes: jax.Array, dtype: Any) -> jax.Array:
    """Keys `[B, J, D, H, S]` of coefficients `[B, J, S, R]` in a basis `[B, J, D, H, R]`."""
    codes = codes.astype(basis.dtype)
    if codes.shape[0] * codes.shape[1] > 1:
        return jnp.einsum("bjdhr,bjsr->bjdhs", basis, codes, preferred_element_type=dtype)
    # XLA's CPU backend transposes the coefficients for a product of batches, be it of one, and not for a plain one
    rows = jnp.einsum("wr,sr->ws", basis.reshape(-1, basis.shape[-1]), codes[0, 0], preferred_element_type=dtype)
    return rows.reshape(*basis.shape[:-1], -1)


def _rebuild_from_columns(basis: jax.Array, parts: tuple[jax.Array, ...], dtype: Any) -> jax.Array:
    """The same of packed codes `[B, J, R, S]`, run by run: to put them side by side takes as long as the products."""
    rows = basis.reshape(*basis.shape[:2], -1, basis.shape[-1])
    ends = np.cumsum([part.shape[-2] for part in parts])
    runs = list(zip(jnp.split(rows, ends[:-1], axis=-1), (part.astype(basis.dtype) for part in parts), strict=True))
    if rows.shape[0] * rows.shape[1] == 1:  # as above
        runs = [(row[0, 0], codes[0, 0]) for row, codes in runs]
    products = (jnp.matmul(row, codes, preferred_element_type=dtype) for row, codes in runs)
    return functools.reduce(jnp.add, products).reshape(*basis.shape[:-1], -1)


def _rotate(keys: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Keys `[B, J, D, H, S]` rotated by `cos`, `sin` `[B, 1 or J, half, S]`; in float32, returned in their dtype."""
    half = cos.shape[2]
    first, second = (x.astype(jnp.float32) for x in (keys[:, :, :half], keys[:, :, half : 2 * half]))
    cos, sin = cos[:, :, :, None], sin[:, :, :, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(x.astype(keys.dtype) for x in rotated), keys[:, :, 2 * half :]], axis=2)


def _heads_inside(basis: jax.Array, kv_heads: int) -> jax.Array:
    """`[.., J, D, H, R]` of a basis `[.., J, H * D, R]`."""
    *lead, groups, width, rank = basis.shape
    each = kv_heads // groups
    return basis.reshape(*lead, groups, each, width // each, rank).swapaxes(-3, -2)


def _of_heads(mask: jax.Array, shared: int, heads: int) -> jax.Array:
    """`[B, K, T, G, S]` where each kv head reads keys of its own: of packed tokens the mask is one of all query heads."""
    if shared == 1 or mask.shape[3] != heads:
        return mask
    batch, _, queries, _, slots = mask.shape
    return mask.reshape(batch, queries, shared, heads // shared, slots).swapaxes(1, 2)


def _among_zeros(q: jax.Array, kv_heads: int, groups: int) -> jax.Array:
    """Queries `[B, T, N, D * H]` that meet their own head only of the keys `[B, J, D, H, S]`."""
    batch, queries, heads, dim = q.shape
    each = kv_heads // groups
    own = np.arange(heads)[:, None] // (heads // kv_heads) % each == np.arange(each)
    return (q[..., None] * own[:, None].astype(q.dtype)).reshape(batch, queries, heads, dim * each)
