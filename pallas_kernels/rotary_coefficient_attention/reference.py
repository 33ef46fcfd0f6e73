"""The op in XLA, and the truth in tests.

Rebuilt keys lie tokens last, `[B, J, H, D, S]` for the H = K / J heads that share coefficients: a rotation then adds
whole rows, which splits evenly over threads and transposes nothing. A few queries meet all heads of a layer in one
product, and their logits are gathered over a stretch of several blocks: one softmax, and values read where they lie.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.codecs.basis import reconstruct, split_heads
from lowrank_kv_jax.pallas_kernels.blockwise import (
    attend_values,
    block_range,
    block_slots,
    blockwise_attention,
    slice_block,
    spread_heads,
    visible_slots,
)
from lowrank_kv_jax.partial import AttnPartial
from lowrank_kv_jax.positions import Runs
from lowrank_kv_jax.rope import RopeSpec, rope_angles

LARGEST = 2304  # tokens of a block: every block costs some time of its own, measured fastest on XLA's CPU backend
TILE = 32  # blocks are multiples of it
STRETCH = 4 * LARGEST  # tokens whose logits are gathered
TOGETHER = 64  # queries times heads up to which one product with zeros in it is cheaper than one for each kv head


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis, key_mean=None
) -> AttnPartial:
    batch, queries, heads, dim = q.shape
    groups, size = tokens.keys.shape[1:3]
    few = value_basis is None and queries * heads <= TOGETHER and tokens.values.shape[1] <= groups
    few = few and jax.device_count() == 1  # heads that lie on several devices must not meet in one product
    stretch = block_size(size, STRETCH if few else LARGEST)
    block = block_size(stretch, LARGEST)
    shared = groups if few else kv_heads
    basis = split_heads(key_basis, kv_heads).astype(q.dtype)
    basis = jnp.broadcast_to(basis, (batch, *basis.shape[-4:]))

    def keys_from(start):
        """Of a block: `[B, J, H D, S]` for few queries, else `[B, K, D, S]`."""
        keys = _rebuild(basis, slice_block(tokens.keys, start, block).astype(q.dtype))
        if key_mean is not None:
            keys = keys + key_mean.reshape(groups, -1, dim, 1).astype(q.dtype)
        if rope is not None:
            positions = tokens.positions.at(start + jnp.arange(block))
            keys = _rotate(keys, *block_angles(rope, tokens.positions, positions.reshape(batch, -1, block), start))
        if few:
            parts = [keys[:, :, :, at].reshape(batch, groups, -1, block) for at in _parts(rope, dim)]
            return jnp.concatenate(parts, axis=2)
        return keys.reshape(batch, kv_heads, dim, block)

    def read(i):
        start, slots, fresh = block_slots(i, size, stretch)
        mask, _ = visible_slots(tokens, slots, fresh, q_positions, causal, window, heads)
        if few and block < stretch:
            used = -(-jnp.clip(jnp.max(tokens.lengths) - start, 0, stretch) // block)
            blocks = _Blocks(start, stretch, block, used)
            return functools.partial(blocks.logits, keys_from), functools.partial(blocks.attend, tokens.values), mask
        values = slice_block(tokens.values, start, stretch).astype(q.dtype)
        if value_basis is not None:
            values = reconstruct(value_basis, values, kv_heads)
        return keys_from(start), values if values.shape[1] == 1 else spread_heads(values, shared), mask

    value_dim = tokens.values.shape[-1] if value_basis is None else dim
    first, last = block_range(size, tokens.lengths, block=stretch)
    return blockwise_attention(
        _among_zeros(q, kv_heads, groups, _parts(rope, dim)) if few else q, read, first, last, shared_heads=shared,
        value_dim=value_dim, scale=scale, tokens_last=True,
    )


def block_size(size: int, largest: int) -> int:
    """Tokens of each block of a buffer: about equal ones, of which none is larger than `largest` or the buffer."""
    even = -(-size // -(-size // largest))
    return min(-(-even // TILE) * TILE, largest, size)


def block_angles(rope: RopeSpec, where, positions: jax.Array, start) -> tuple[jax.Array, jax.Array]:
    """cos and sin of a block's tokens, float32 `[B, 1 or J, half, S]`.

    Within runs of consecutive positions by the addition theorem, from a table of places and the angle at which the block
    begins: XLA's sines on a CPU take as long as all other work on a block.

    Args:
        where: the positions of the whole buffer.
        positions: those of the block's tokens, int32 `[B, 1 or J, S]`.
        start: slot at which the block begins.
    """
    if not isinstance(where, Runs):
        cos, sin = rope_angles(rope, positions)
        return cos.swapaxes(-1, -2), sin.swapaxes(-1, -2)
    size = positions.shape[-1]
    first, offset = where.pieces()
    # rounded as the model's own frequencies are: over thousands of tokens the difference would show
    frequency = rope.inverse_frequencies().astype(np.float32).astype(np.float64)
    place = frequency[:, None] * np.arange(size)
    place_cos, place_sin = (jnp.asarray(f(place), jnp.float32) for f in (np.cos, np.sin))
    base_cos, base_sin = (x[..., None] for x in rope_angles(rope, start + offset))  # [B, P + 1, half, 1]
    cos, sin = base_cos[:, 0], base_sin[:, 0]
    for run in range(1, first.shape[1]):
        behind = start + jnp.arange(size) >= first[:, run, None, None]
        cos, sin = (jnp.where(behind, base[:, run], x) for base, x in ((base_cos, cos), (base_sin, sin)))
    cos, sin = place_cos * cos - place_sin * sin, place_sin * cos + place_cos * sin
    return cos[:, None], sin[:, None]


def _rebuild(basis: jax.Array, codes: jax.Array) -> jax.Array:
    """Keys `[B, J, H, D, S]` of coefficients `[B, J, S, R]` in a basis `[B, J, H, D, R]`."""
    if codes.shape[0] * codes.shape[1] > 1:
        return jnp.einsum("bjhdr,bjsr->bjhds", basis, codes)
    # XLA's CPU backend transposes the coefficients for a product of batches, be it of one, and not for a plain one
    rows = jnp.einsum("wr,sr->ws", basis.reshape(-1, basis.shape[-1]), codes[0, 0])
    return rows.reshape(*basis.shape[:-1], -1)


def _rotate(keys: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Keys `[B, J, H, D, S]` rotated by `cos`, `sin` `[B, 1 or J, half, S]`; in float32, returned in their dtype."""
    half = cos.shape[2]
    first, second = (x.astype(jnp.float32) for x in (keys[:, :, :, :half], keys[:, :, :, half : 2 * half]))
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(x.astype(keys.dtype) for x in rotated), keys[:, :, :, 2 * half :]], axis=3)


def _parts(rope: RopeSpec | None, dim: int) -> list[slice]:
    """Channels of a head that are computed alike: both halves of the rotated ones, and the others.

    Part by part, each of all heads, keys are written in as many even shares as there are threads.
    """
    half = 0 if rope is None else rope.rotary_dim // 2
    edges = (0, half, 2 * half, dim)
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _among_zeros(q: jax.Array, kv_heads: int, groups: int, parts: list[slice]) -> jax.Array:
    """Queries `[B, T, N, H D]` that meet their own head only of keys `[B, J, H D, S]`, channels part by part."""
    batch, queries, heads, _ = q.shape
    each = kv_heads // groups
    own = (np.arange(heads)[:, None] // (heads // kv_heads) % each == np.arange(each))[:, :, None]
    own = own.astype(q.dtype)
    spread = [(q[..., None, at] * own).reshape(batch, queries, heads, -1) for at in parts]
    return jnp.concatenate(spread, axis=-1)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """A stretch of slots, rebuilt block by block.

    Attributes:
        start: its first slot.
        size: slots.
        block: slots of a block; the last one begins earlier where they do not fill it.
        used: blocks that hold a token, traced.
    """

    start: jax.Array
    size: int
    block: int
    used: jax.Array

    def logits(self, keys_from: Callable, q: jax.Array) -> jax.Array:
        """float32 `[B, J, M, size]` of queries `[B, J, M, W]`; zero beyond the blocks in use."""

        def one(j, out):
            at = jnp.minimum(j * self.block, self.size - self.block)
            keys = keys_from(self.start + at)
            here = jnp.einsum("bjmd,bjds->bjms", q, keys, preferred_element_type=jnp.float32)
            return jax.lax.dynamic_update_slice_in_dim(out, here, at, axis=3)

        return jax.lax.fori_loop(0, self.used, one, jnp.zeros((*q.shape[:3], self.size), jnp.float32))

    def attend(self, stored: jax.Array, weights: jax.Array) -> jax.Array:
        """float32 `[B, J, M, Dv]` of weights `[B, J, M, size]`.

        In one product, which copies no values, where all blocks are in use; else only the blocks that are.
        """

        def one(j, out):
            at = jnp.minimum(j * self.block, self.size - self.block)
            new = (at + jnp.arange(self.block) >= j * self.block).astype(weights.dtype)
            here = jax.lax.dynamic_slice_in_dim(weights, at, self.block, axis=3) * new
            return out + attend_values(here, slice_block(stored, self.start + at, self.block))

        def by_blocks(weights):
            zero = jnp.zeros((*weights.shape[:3], stored.shape[-1]), jnp.float32)
            return jax.lax.fori_loop(0, self.used, one, zero)

        if hasattr(stored, "read_block"):  # widened on read
            return by_blocks(weights)

        def whole(weights):
            return attend_values(weights, slice_block(stored, self.start, self.size))

        return jax.lax.cond(self.used == -(-self.size // self.block), whole, by_blocks, weights)
