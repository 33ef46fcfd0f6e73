"""Quantised storage: codes of 2, 4 or 8 bits with scales, widened where they are read.

Storage is the second half of a codec: any transform's output can be kept by it. What a storage class holds
stands in the place of a plain array in a segment, and the attention ops read it block by block.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import BFloat16, Bool, Float, Float32, Int, Shaped, UInt16

from lowrank_kv_jax.storage.basis import RowsOf
from lowrank_kv_jax.storage.block_reads import block_for, block_range, block_slots, slice_block
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.over_tokens import begin_of, on_each
from lowrank_kv_jax.storage.state import leaf, state, static, write_tokens

TILE = 128  # tokens that share a scale
TOKEN_BITS = (2, 4, 8)
BASIS_STORAGE = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantise(
    x: Float[jax.Array, "*shape"], axis: int, dtype: str = "int8"
) -> tuple[Shaped[jax.Array, "*shape"], BFloat16[jax.Array, "..."]]:
    """Symmetric codes of `dtype` ("int8" or "float8_e4m3fn") and bfloat16 scales, one for all of `axis`.

    The scale is rounded before it is used, so that codes * scale errs by half a step at most. All zeros stay
    zeros.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    # rounding to bfloat16 takes away at most 2^-8 of it: the largest entry must still fit
    scale = (largest * (1 + 2.0**-8) / _LARGEST[dtype]).astype(jnp.bfloat16)
    codes = x / jnp.where(scale == 0, 1.0, scale.astype(jnp.float32))
    codes = jnp.round(codes).astype(jnp.int8) if dtype == "int8" else codes.astype(dtype)
    return codes, scale


# ---- tokens


@dataclasses.dataclass(frozen=True)
class Tile:
    """What shares a scale: so many tokens times so many channels (None: all of them).

    (128, 1) suits coefficients, whose components differ in size by orders of magnitude; (1, None) is 8-bit KV with a
    scale for each token; KIVI takes (32, 1) for keys and (1, 32) for values.
    """

    tokens: int = TILE
    channels: int | None = 1

    def within(self, channels: int) -> "Tile":
        """The tile of tokens of so many channels."""
        return self if self.channels is None else Tile(self.tokens, min(self.channels, channels))


COEFFICIENTS = Tile()


@state
class QuantisedTokens:
    """Tokens in `bits` bits a channel: x ~ lows + codes * scales.

    Attributes:
        codes: int8 `[B, J, S, R]` for 8 bits, which are symmetric; for fewer uint8 `[B, J, S, ceil(R * bits / 8)]`,
            several unsigned codes packed in a byte, the first channel in its lowest bits.
        scales: `[B, J, ceil(S / tile.tokens), ceil(R / tile.channels)]`, the bits of bfloat16 numbers as uint16: XLA's
            CPU backend would widen all of a bfloat16 buffer in order to gather from it or to scatter into it.
        lows: the least value of each tile, like `scales`; None for 8 bits.
        bits: 2, 4 or 8.
        tile: what shares a scale.
        channels: R.
    """

    codes: jax.Array = leaf("batch", "kv_heads", "tokens", None, kind="coefficients")
    scales: jax.Array = leaf("batch", "kv_heads", "tokens", None, kind="scales")
    lows: jax.Array | None = leaf("batch", "kv_heads", "tokens", None, kind="scales")
    bits: int = static()
    tile: Tile = static()
    channels: int = static()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.channels)

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float32[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size`, float32 `[B, J, size, R]`."""
        codes = unpack(jax.lax.dynamic_slice_in_dim(self.codes, start, size, axis=2), self.bits, self.channels)
        tiles = (start + jnp.arange(size)) // self.tile.tokens
        scales = self._by_channel(jnp.take(self.scales, tiles, axis=2))
        x = codes.astype(jnp.float32) * scales
        return x if self.lows is None else x + self._by_channel(jnp.take(self.lows, tiles, axis=2))

    def write_block(
        self, start: Int[jax.Array, ""] | int, x: Float[jax.Array, "B J T R"], valid: Bool[jax.Array, "#B T"],
        touch: Bool[jax.Array, "#B n"],
    ) -> "QuantisedTokens":
        """Whole tiles written anew from slot `start`, a multiple of `tile.tokens`.

        Args:
            x: `[B, J, n * tile.tokens, R]`.
            valid: bool `[B, n * tile.tokens]`, slots that hold a token; in front of the others in each tile.
            touch: bool `[B, n]`, tiles to write; the others keep their codes and scales.
        """
        begin = start // self.tile.tokens
        n = touch.shape[1]
        scales, lows = (
            None if a is None else jax.lax.dynamic_slice_in_dim(a, begin, n, axis=2) for a in (self.scales, self.lows)
        )
        fresh = encode_tiles(x, self.bits, self.tile, valid)
        old = QuantisedTokens(
            jax.lax.dynamic_slice_in_dim(self.codes, start, x.shape[2], axis=2), scales, lows, self.bits, self.tile,
            self.channels,
        )
        every = jnp.repeat(touch, self.tile.tokens, axis=1)[:, None, :, None]
        mask = touch[:, None, :, None]
        return self._put(
            start, begin, jnp.where(every, fresh.codes, old.codes), jnp.where(mask, fresh.scales, old.scales),
            None if self.lows is None else jnp.where(mask, fresh.lows, old.lows),
        )

    def _put(self, start, begin, codes, scales, lows) -> "QuantisedTokens":
        def put(buffer, new, at):
            return None if buffer is None else jax.lax.dynamic_update_slice_in_dim(buffer, new, at, axis=2)

        return QuantisedTokens(
            put(self.codes, codes, start), put(self.scales, scales, begin), put(self.lows, lows, begin), self.bits,
            self.tile, self.channels,
        )

    def _by_channel(self, of_tiles: jax.Array) -> jax.Array:
        each = self.tile.channels
        of_tiles = widen_scales(of_tiles)
        if each == 1 or each is None:  # broadcasts
            return of_tiles
        return jnp.repeat(of_tiles, each, axis=-1)[..., : self.channels]


def store_tokens(
    x: Float[jax.Array, "B J S R"], bits: int | None, dtype, tile: Tile = COEFFICIENTS
) -> "jax.Array | QuantisedTokens":
    """Keep tokens `[B, J, S, R]` as `dtype`, or in `bits` bits."""
    if bits is None:
        return narrow(x, dtype)
    size = x.shape[2]
    room = -size % tile.tokens
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0)))
    valid = jnp.ones((x.shape[0], size + room), bool)
    stored = encode_tiles(padded, bits, tile, valid)
    codes = stored.codes[:, :, :size]
    return QuantisedTokens(codes, stored.scales, stored.lows, bits, tile, x.shape[3])


def empty_tokens(shape: tuple[int, int, int, int], bits: int | None, dtype, tile: Tile = COEFFICIENTS):
    """What `store_tokens` makes of zeros `[B, J, S, R]`, without coding them."""
    if bits is None:
        return jnp.zeros(shape, dtype)
    *lead, size, channels = shape
    each = channels if tile.channels is None else tile.channels
    codes = jnp.zeros((*lead, size, -(-channels * bits // 8)), jnp.int8 if bits == 8 else jnp.uint8)
    sides = jnp.zeros((*lead, -(-size // tile.tokens), -(-channels // each)), jnp.uint16)
    return QuantisedTokens(codes, sides, None if bits == 8 else jnp.zeros_like(sides), bits, tile, channels)


def read_tokens(stored: "jax.Array | QuantisedTokens") -> Float[jax.Array, "B J S R"]:
    """All tokens as an array: what is no array as it is read, an array widened to float32."""
    if hasattr(stored, "read_block"):
        return stored.read_block(0, stored.shape[2])
    return stored.astype(jnp.float32)


def append_tokens(
    stored: "jax.Array | QuantisedTokens", new: Float[jax.Array, "B J T R"], start: Int[jax.Array, " B"],
    counts: Int[jax.Array, " B"],
):
    """Write the first `counts[b]` of T tokens `[B, J, T, R]` of each row behind its `start[b]`, the length so far; O(T).

    Each device writes the tokens whose slots lie on it. In quantised storage a tile is coded anew each time that tokens
    come to it: those that it held already then err by half a step of every scale that they were coded with.
    """
    return on_each(_append, stored, new, start, counts, out="stored")


def _append(number: jax.Array, stored, new: jax.Array, start: jax.Array, counts: jax.Array):
    """The tokens that belong to this device's slots."""
    size, width, start = stored.shape[2], new.shape[2], start - begin_of(number, stored)
    if not isinstance(stored, QuantisedTokens):
        for begin in range(0, width, size):  # a device may have fewer slots than there are tokens
            stored = write_tokens(stored, new[:, :, begin : begin + size], start + begin, counts - begin)
        return stored
    tokens = stored.tile.tokens
    if size % tokens:
        raise ValueError(f"{size} slots: storage that is appended to needs a multiple of the {tokens} tokens of a tile")
    tiles = min((width + tokens - 2) // tokens + 1, size // tokens)

    def row(held, fresh, begin, count):
        held = jax.tree.map(lambda a: a[None], held)
        first = jnp.clip(begin // tokens, 0, size // tokens - tiles)
        slots = first * tokens + jnp.arange(tiles * tokens)
        source = slots - begin
        is_new = (source >= 0) & (source < count)
        old = held.read_block(first * tokens, tiles * tokens)[0]
        x = jnp.where(is_new[:, None], jnp.take(fresh, jnp.clip(source, 0, width - 1), axis=1), old)
        touch = jnp.any(is_new.reshape(tiles, tokens), axis=1)
        written = held.write_block(first * tokens, x[None], (slots < begin + count)[None], touch[None])
        return jax.tree.map(lambda a: a[0], written)

    return jax.vmap(row)(stored, new.astype(jnp.float32), start, counts)


def map_tokens(
    stored: "jax.Array | QuantisedTokens", lengths: Int[jax.Array, " B"], change, rows: Bool[jax.Array, " B"], *known
) -> "jax.Array | QuantisedTokens":
    """Every token by `change(tokens, *known)`, `[B, J, T, R]` to the same shape, block by block in place: O(length) work.

    Args:
        lengths: int32 `[B]`, tokens held by each row.
        change: closes over no array.
        rows: bool `[B]`, rows to change; the others keep what they hold to the bit, quantised or not.
        known: arrays that it needs.
    """
    if isinstance(stored, QuantisedTokens) and stored.shape[2] % stored.tile.tokens:
        raise ValueError(f"{stored.shape[2]} slots: storage that changes needs a multiple of {stored.tile.tokens}")

    return on_each(functools.partial(_mapped, change), stored, jnp.where(rows, lengths, 0), rows, *known, out="stored")


def _mapped(change, number: jax.Array, stored, lengths: jax.Array, rows: jax.Array, *known):
    """`map_tokens` of this device's slots."""
    batch, heads, size, channels = stored.shape
    lengths, width = jnp.clip(lengths - begin_of(number, stored), 0, size), block_for(size, 0, batch * heads * channels)

    def step(i, buffer):
        start, slots, fresh = block_slots(i, size, width)
        block = slice_block(buffer, start, width)
        if isinstance(buffer, QuantisedTokens):
            valid = slots[None] < lengths[:, None]
            touch = fresh.reshape(1, -1, buffer.tile.tokens)[:, :, 0] & rows[:, None]
            return buffer.write_block(start, change(block, *known), valid, touch)
        moved = jnp.where(fresh[:, None] & rows[:, None, None, None], narrow(change(block, *known), block.dtype), block)
        if hasattr(buffer, "write_block"):
            return buffer.write_block(start, moved)
        if moved.shape == buffer.shape:
            return moved
        return jax.lax.dynamic_update_slice_in_dim(buffer, moved, start, axis=2)

    return jax.lax.fori_loop(*block_range(size, lengths, block=width), step, stored)


def padded_to_tiles(stored: "jax.Array | QuantisedTokens") -> "jax.Array | QuantisedTokens":
    """Quantised storage with so many slots that it ends with a tile; anything else as it is."""
    if not isinstance(stored, QuantisedTokens):
        return stored
    room = -stored.shape[2] % stored.tile.tokens
    return dataclasses.replace(stored, codes=jnp.pad(stored.codes, ((0, 0), (0, 0), (0, room), (0, 0))))


def without_padding(stored: "jax.Array | QuantisedTokens", size: int) -> "jax.Array | QuantisedTokens":
    """The first `size` slots of what `padded_to_tiles` returned."""
    if not isinstance(stored, QuantisedTokens):
        return stored
    return dataclasses.replace(stored, codes=stored.codes[:, :, :size])


def encode_tiles(
    x: Float[jax.Array, "B J S R"], bits: int, tile: Tile, valid: Bool[jax.Array, "#B S"]
) -> QuantisedTokens:
    """Codes of whole tiles `[B, J, n * tile.tokens, R]`; slots that are not `valid` `[B, ..]` get the code of zero."""
    batch, heads, size, channels = x.shape
    each = channels if tile.channels is None else tile.channels
    x = x.astype(jnp.float32)
    valid = valid[:, None, :, None]
    tiles = jnp.where(valid, x, 0.0).reshape(batch, heads, -1, tile.tokens, channels)
    # what no token fills must not widen the range: the first slot of a tile stands in for it
    filled = jnp.where(valid.reshape(batch, 1, -1, tile.tokens, 1), tiles, tiles[:, :, :, :1])
    room = ((0, 0),) * 4 + ((0, -channels % each),)
    filled = jnp.pad(filled, room, mode="edge").reshape(*filled.shape[:-1], -1, each)
    if bits == 8:
        low, steps = None, 127.0
        scale = _grid(jnp.max(jnp.abs(filled), axis=(3, 5)) / steps)
    else:
        steps = 2.0**bits - 1
        low = _below(jnp.min(filled, axis=(3, 5)))
        scale = _grid((jnp.max(filled, axis=(3, 5)) - low.astype(jnp.float32)) / steps)

    def spread(of_tiles):
        return jnp.repeat(of_tiles.astype(jnp.float32), each, axis=-1)[:, :, :, None, :channels]

    codes = (tiles if low is None else tiles - spread(low)) / spread(jnp.where(scale == 0, 1, scale))
    codes = jnp.round(jnp.clip(codes, -steps if low is None else 0.0, steps)).reshape(batch, heads, size, channels)
    scale, low = (None if x is None else jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (scale, low))
    return QuantisedTokens(_pack(codes, bits), scale, low, bits, tile, channels)


def widen_scales(bits_of_bfloat16: UInt16[jax.Array, "*shape"]) -> Float32[jax.Array, "*shape"]:
    """float32 of stored scales."""
    return jax.lax.bitcast_convert_type(bits_of_bfloat16, jnp.bfloat16).astype(jnp.float32)


def _grid(step: jax.Array) -> jax.Array:
    """The least bfloat16 scale at or above a float32 step (up to rounding), so that the largest entry still fits."""
    rounded = step.astype(jnp.bfloat16)
    low = rounded.astype(jnp.float32) < step * (1 - 1e-6)
    return jnp.where(low, jnp.nextafter(rounded, jnp.bfloat16(jnp.inf)), rounded)


def _below(x: jax.Array) -> jax.Array:
    rounded = x.astype(jnp.bfloat16)
    return jnp.where(rounded.astype(jnp.float32) > x, jnp.nextafter(rounded, jnp.bfloat16(-jnp.inf)), rounded)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Whole-number codes `[..., R]` as int8, or packed into uint8 `[..., ceil(R * bits / 8)]`."""
    if bits == 8:
        return codes.astype(jnp.int8)
    each = 8 // bits
    codes = jnp.pad(codes.astype(jnp.uint8), [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    codes = codes.reshape(*codes.shape[:-1], -1, each) << (bits * jnp.arange(each, dtype=jnp.uint8))
    return jnp.sum(codes, axis=-1, dtype=jnp.uint8)


def unpack(packed: jax.Array, bits: int, channels: int) -> jax.Array:
    """Codes `[..., R]` of what `QuantisedTokens.codes` holds."""
    if bits == 8:
        return packed
    shifts = bits * jnp.arange(8 // bits, dtype=jnp.uint8)
    codes = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :channels]


# ---- bases


@state
class ScaledBasis:
    """A basis in 8 bits, a scale for each column.

    Attributes:
        codes: int8 or float8 `[B, J, W, R]`.
        scales: bfloat16 `[B, J, 1, R]`.
    """

    codes: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    scales: jax.Array = leaf("batch", "kv_heads", None, "rank", kind="scales")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


def store_basis(basis: Float[jax.Array, "B J W R"], dtype: str) -> "jax.Array | ScaledBasis":
    """Keep a basis `[B, J, W, R]` as one of `BASIS_STORAGE`."""
    if dtype in _LARGEST:
        return ScaledBasis(*quantise(basis, axis=2, dtype=dtype))
    return basis.astype(dtype)


def read_basis(
    stored: "jax.Array | ScaledBasis", begin: int | jax.Array = 0, width: int | None = None
) -> Float[jax.Array, "B J W R"]:
    """So many rows of the width from `begin` on, float32 `[B, J, width, R]`; by default all of them."""
    def rows(x: jax.Array) -> jax.Array:
        return x if width is None else jax.lax.dynamic_slice_in_dim(x, begin, width, axis=2)

    if isinstance(stored, ScaledBasis):
        return rows(stored.codes).astype(jnp.float32) * stored.scales.astype(jnp.float32)
    return rows(stored).astype(jnp.float32)


def rows_of_basis(stored: "jax.Array | ScaledBasis", begin: int | jax.Array, width: int) -> "jax.Array | RowsOf":
    """The same where they lie, in the dtype in which they are stored; widened if it is 8 bits, or the first is traced."""
    if isinstance(stored, jax.Array) and isinstance(begin, int):
        return RowsOf(stored, begin, width)
    return read_basis(stored, begin, width)
