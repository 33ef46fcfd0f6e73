"""Quantised tokens of several heads behind each other in one buffer: no two heads share a scale."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int, Int32

from lowrank_kv_jax.storage.quantised import Tile, encode_tiles, unpack, widen_scales
from lowrank_kv_jax.storage.state import leaf, state, static


@state
class PackedTokens:
    """Tokens of H heads, head after head, in tiles of tokens that begin anew with each head.

    Attributes:
        codes: as in `QuantisedTokens`, `[B, 1, S, C]`.
        scales: bits of bfloat16 numbers as uint16, `[B, 1, ceil(S / tile) + H - 1, R]`: no split of the slots needs more.
        lows: like `scales`; None for 8 bits.
        starts: int32 `[B, H]`, the first slot of each head.
        bits: 2, 4 or 8.
        tile: tokens that share a scale, each channel its own.
        channels: R.
        first: int32 `[B, H]`, the tile with which each head begins, where these are not all heads; None: see
            `first_tiles`.
    """

    codes: jax.Array = leaf("batch", None, "tokens", None, kind="coefficients")
    scales: jax.Array = leaf("batch", None, None, None, kind="scales")
    lows: jax.Array | None = leaf("batch", None, None, None, kind="scales")
    starts: jax.Array = leaf("batch", None, kind="indices")
    bits: int = static()
    tile: int = static()
    channels: int = static()
    first: jax.Array | None = leaf("batch", None, kind="indices", default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.channels)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float32[jax.Array, "B 1 {size} R"]:
        """Tokens `start` to `start + size`, float32 `[B, 1, size, R]`."""
        codes = unpack(jax.lax.dynamic_slice_in_dim(self.codes, start, size, axis=2), self.bits, self.channels)
        tiles = tiles_of(self.starts, start + jnp.arange(size), self.tile)[:, None, :, None]
        x = codes.astype(jnp.float32) * widen_scales(jnp.take_along_axis(self.scales, tiles, axis=2, mode="clip"))
        if self.lows is None:
            return x
        return x + widen_scales(jnp.take_along_axis(self.lows, tiles, axis=2, mode="clip"))


def tiles_of(starts: Int[jax.Array, "B H"], slots: Int[jax.Array, " S"], tile: int) -> Int32[jax.Array, "B S"]:
    """The tile of each of `slots` `[S]`, int32 `[B, S]`, where heads begin at `starts` `[B, H]`.

    Counted from any head that begins before a slot the tile comes out too low, or right: the highest count is right.
    """
    from_start = slots[None, None] - starts[:, :, None]
    counted = first_tiles(starts, tile)[:, :, None] + from_start // tile
    return jnp.max(jnp.where(from_start >= 0, counted, 0), axis=1)


def first_tiles(starts: Int[jax.Array, "B H"], tile: int) -> Int32[jax.Array, "B H"]:
    """The tile with which each of all heads begins, int32 `[B, H]`, from its first slot."""
    tiles = -(-jnp.diff(starts, axis=1) // tile)
    return jnp.pad(jnp.cumsum(tiles, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def heads_of(stored: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """First slots and first tiles of the heads of `PackedTokens`, or of what stands for them; None of other storage."""
    if not hasattr(stored, "starts"):
        return None, None
    return stored.starts, first_tiles(stored.starts, stored.tile) if stored.first is None else stored.first


def of_some_heads(stored: Any, begin: Int[jax.Array, ""], count: int) -> Any:
    """`PackedTokens`, or what stands for them, of `count` heads from `begin` on, in the same buffer."""
    starts, first = (jax.lax.dynamic_slice_in_dim(x, begin, count, axis=1) for x in heads_of(stored))
    return dataclasses.replace(stored, starts=starts, first=first)


def empty_packed(batch: int, heads: int, size: int, channels: int, bits: int, tile: int) -> PackedTokens:
    """Zeros, with room for `size` tokens of `heads` heads together."""
    codes = jnp.zeros((batch, 1, size, -(-channels * bits // 8)), jnp.int8 if bits == 8 else jnp.uint8)
    sides = jnp.zeros((batch, 1, -(-size // tile) + heads - 1, channels), jnp.uint16)
    starts = jnp.zeros((batch, heads), jnp.int32)
    return PackedTokens(codes, sides, None if bits == 8 else jnp.zeros_like(sides), starts, bits, tile, channels)


def hold_packed(
    stored: PackedTokens, x: Float[jax.Array, "B 1 S R"], owner: Int[jax.Array, "B 1 S"], length: Int[jax.Array, " B"]
) -> PackedTokens:
    """Fill an empty buffer.

    Args:
        x: `[B, 1, S, R]`, the tokens of the first head, of the second, ...
        owner: `[B, 1, S]`, their heads.
        length: int32 `[B]`, tokens of each row.
    """
    size, tile = stored.codes.shape[2], stored.tile
    slots = jnp.arange(size)
    there = slots[None] < length[:, None]
    heads = jnp.arange(stored.starts.shape[1])
    starts = jnp.sum((owner < heads[:, None]) & there[:, None], axis=2, dtype=jnp.int32)
    tiles, count = tiles_of(starts, slots, tile), stored.scales.shape[2]
    begin = jnp.take_along_axis(starts, owner[:, 0].astype(jnp.int32), axis=1)
    spread = jnp.where(there, tiles * tile + (slots - begin) % tile, count * tile)  # slots in whole tiles
    source = jax.vmap(lambda at: jnp.full((count * tile,), -1, jnp.int32).at[at].set(slots, mode="drop"))(spread)
    whole = jnp.take_along_axis(x, jnp.maximum(source, 0)[:, None, :, None], axis=2)
    coded = encode_tiles(whole, stored.bits, Tile(tile, 1), source >= 0)
    codes = jnp.take_along_axis(coded.codes, spread[:, None, :, None], axis=2, mode="clip")
    return PackedTokens(codes, coded.scales, coded.lows, starts, stored.bits, tile, stored.channels)
