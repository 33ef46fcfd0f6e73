"""Codes of 2, 4 or 8 bits with scales for tiles, as a TPU reads them: a token's bytes one below the other.

Unpacked, they give planes: the channels in the lowest bits of all bytes, those in the next, .. Scales that tokens share
stay in rows, the channels in that order; those of a single token lie above each other, as its codes do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int, Integer

from lowrank_kv_jax.storage.packed import PackedTokens, tiles_of
from lowrank_kv_jax.storage.quantised import QuantisedTokens, Tile, unpack, widen_scales
from lowrank_kv_jax.storage.state import leaf, state, static

LANES = 128  # tokens are rounded up to so many
SUBLANES = 8  # and bytes of a token, and its scales, to so many
SCALE_ROWS = 16  # and tiles, where their number is not that of the slots


@state
class CodesOnLanes:
    """Whole numbers of few bits, a token's one below the other.

    Attributes:
        on_lanes: int8 for 8 bits, uint8 for fewer `[B, J, C, S']`, C bytes a token and S' tokens, rounded up.
        bits: 2, 4 or 8.
        channels: R.
        size: S.
    """

    on_lanes: jax.Array = leaf("batch", "kv_heads", None, "tokens", kind="coefficients")
    bits: int = static()
    channels: int = static()
    size: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array of the numbers."""
        batch, heads, *_ = self.on_lanes.shape
        return batch, heads, self.size, self.channels

    def in_rows(self) -> jax.Array:
        """As `QuantisedTokens.codes`."""
        return self.on_lanes[:, :, : -(-self.channels * self.bits // 8), : self.size].swapaxes(2, 3)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Integer[jax.Array, "B J {size} R"]:
        """Those of tokens `start` to `start + size`."""
        block = jax.lax.dynamic_slice_in_dim(self.on_lanes, start, size, axis=3)
        return unpack(block.swapaxes(2, 3), self.bits, self.channels)[..., : self.channels]


def codes_on_lanes(codes: jax.Array, bits: int, channels: int) -> CodesOnLanes:
    """What `QuantisedTokens.codes` holds, `[B, J, S, C]`."""
    *_, size, width = codes.shape
    more = ((0, 0), (0, 0), (0, -width % SUBLANES), (0, -size % LANES))
    return CodesOnLanes(jnp.pad(codes.swapaxes(2, 3), more), bits, channels, size)


def in_planes(x: jax.Array, codes: CodesOnLanes) -> jax.Array:
    """Channels `[.., R]` in the order of planes, as many as there is room for in the bytes; zeros where there is none."""
    each, rows = 8 // codes.bits, codes.on_lanes.shape[2]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, each * rows - x.shape[-1])])
    return x.reshape(*x.shape[:-1], rows, each).swapaxes(-1, -2).reshape(x.shape)


def from_planes(x: jax.Array, codes: CodesOnLanes) -> jax.Array:
    """Channels `[.., R]` of those in planes."""
    x = x.reshape(*x.shape[:-1], 8 // codes.bits, -1).swapaxes(-1, -2).reshape(x.shape)
    return x[..., : codes.channels]


@state
class TiledOnLanes:
    """`QuantisedTokens` of which several tokens share a scale, each channel its own.

    Attributes:
        codes: theirs.
        scales, lows: as there, in planes `[B, J, tiles, R']`.
        tile: what shares them.
    """

    codes: CodesOnLanes
    scales: jax.Array = leaf("batch", "kv_heads", "tokens", None, kind="scales")
    lows: jax.Array | None = leaf("batch", "kv_heads", "tokens", None, kind="scales")
    tile: Tile = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return self.codes.shape

    def in_rows(self) -> QuantisedTokens:
        codes = self.codes
        scales, lows = from_planes(self.scales, codes), None if self.lows is None else from_planes(self.lows, codes)
        return QuantisedTokens(codes.in_rows(), scales, lows, codes.bits, self.tile, codes.channels)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float32[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, float32 `[B, J, size, R]`."""
        tiles = (start + jnp.arange(size)) // self.tile.tokens

        def of_tokens(x: jax.Array) -> jax.Array:
            return from_planes(jnp.take(x, tiles, axis=2), self.codes)

        return _numbers(self.codes, start, size, self.scales, self.lows, of_tokens)


@state
class PackedOnLanes:
    """`PackedTokens`: the same of several heads behind each other, in tiles that begin anew with each.

    Attributes:
        codes: theirs, `[B, 1, C, S']`.
        scales, lows: as there, in planes `[B, 1, tiles', R']`, tiles rounded up.
        starts, first: as there, int32 `[B, H]`.
        tile: tokens that share them.
    """

    codes: CodesOnLanes
    scales: jax.Array = leaf("batch", None, None, None, kind="scales")
    lows: jax.Array | None = leaf("batch", None, None, None, kind="scales")
    starts: jax.Array = leaf("batch", None, kind="indices")
    tile: int = static()
    first: jax.Array | None = leaf("batch", None, kind="indices", default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return self.codes.shape

    def in_rows(self) -> PackedTokens:
        codes = self.codes
        there = -(-codes.size // self.tile) + self.starts.shape[1] - 1
        scales, lows = (None if x is None else from_planes(x[:, :, :there], codes) for x in (self.scales, self.lows))
        assert scales is not None
        return PackedTokens(codes.in_rows(), scales, lows, self.starts, codes.bits, self.tile, codes.channels)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float32[jax.Array, "B 1 {size} R"]:
        """Tokens `start` to `start + size`, float32 `[B, 1, size, R]`."""
        tiles = tiles_of(self.starts, start + jnp.arange(size), self.tile)[:, None, :, None]

        def of_tokens(x: jax.Array) -> jax.Array:
            return from_planes(jnp.take_along_axis(x, tiles, axis=2, mode="clip"), self.codes)

        return _numbers(self.codes, start, size, self.scales, self.lows, of_tokens)


@state
class GroupedOnLanes:
    """`QuantisedTokens` of which each token has scales of its own, one for every group of channels.

    Attributes:
        codes: theirs.
        sides: uint16 `[B, J, Q, S']`, the scales of the groups, then their least values where there are any, then zeros.
        tile: of one token, and the channels of a group.
    """

    codes: CodesOnLanes
    sides: jax.Array = leaf("batch", "kv_heads", None, "tokens", kind="scales")
    tile: Tile = static()

    @property
    def group(self) -> int:
        """Channels of a group."""
        return self.tile.channels or self.codes.channels

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        return self.codes.shape

    def in_rows(self) -> QuantisedTokens:
        codes = self.codes
        scales, lows = self._sides(self.sides[..., : codes.size])
        return QuantisedTokens(codes.in_rows(), scales, lows, codes.bits, self.tile, codes.channels)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float32[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, float32 `[B, J, size, R]`."""
        scales, lows = self._sides(jax.lax.dynamic_slice_in_dim(self.sides, start, size, axis=3))

        def of_channels(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, self.group, axis=3)[..., : self.codes.channels]

        return _numbers(self.codes, start, size, scales, lows, of_channels)

    def _sides(self, on_lanes: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Scales and least values `[B, J, S, groups]` of some tokens."""
        groups = groups_of(self.codes.channels, self.group)
        rows = on_lanes.swapaxes(2, 3)
        return rows[..., :groups], None if self.codes.bits == 8 else rows[..., groups : 2 * groups]


def groups_of(channels: int, group: int) -> int:
    """How many groups of channels there are."""
    return -(-channels // group)


def _numbers(
    codes: CodesOnLanes, start, size: int, scales: jax.Array, lows: jax.Array | None, spread: Callable[..., jax.Array]
) -> jax.Array:
    """A block of tokens, float32, by what spreads stored scales and least values over it."""
    x = codes.read_block(start, size).astype(jnp.float32) * widen_scales(spread(scales))
    return x if lows is None else x + widen_scales(spread(lows))


def tiles_on_lanes(stored: QuantisedTokens | PackedTokens) -> Any:
    """Quantised tokens transposed; those in tiles of several tokens and several channels stay as they are."""
    codes = codes_on_lanes(stored.codes, stored.bits, stored.channels)
    if isinstance(stored, PackedTokens):
        more = ((0, 0), (0, 0), (0, -stored.scales.shape[2] % SCALE_ROWS), (0, 0))
        lows = None if stored.lows is None else in_planes(jnp.pad(stored.lows, more), codes)
        return PackedOnLanes(codes, in_planes(jnp.pad(stored.scales, more), codes), lows, stored.starts, stored.tile)
    if stored.tile.tokens > 1:
        if stored.tile.channels != 1:
            return stored
        lows = None if stored.lows is None else in_planes(stored.lows, codes)
        return TiledOnLanes(codes, in_planes(stored.scales, codes), lows, stored.tile)
    sides = jnp.concatenate([x.swapaxes(2, 3) for x in (stored.scales, stored.lows) if x is not None], axis=2)
    more = -sides.shape[2] % SUBLANES, codes.on_lanes.shape[3] - codes.size
    return GroupedOnLanes(codes, jnp.pad(sides, ((0, 0), (0, 0), *((0, n) for n in more))), stored.tile)


def in_tiles_on_lanes(tree: Any) -> bool:
    """Whether a state is what `tiles_on_lanes` makes of tokens."""
    return isinstance(tree, TiledOnLanes | PackedOnLanes | GroupedOnLanes)
