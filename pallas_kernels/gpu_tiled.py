"""Tokens in 2, 4 or 8 bits with a scale for each tile of tokens and channels, as Triton kernels unpack them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_softmax import load_block, scale_behind
from lowrank_kv_jax.storage.eight_bits import EightBits
from lowrank_kv_jax.storage.packed import heads_of

BLOCK = 32  # bytes of a token that are unpacked together
MOST_PIECES = 8  # of them, times components of a byte: more would spill registers
TILES = (128, 64, 32, 16)  # tokens that a program may read at once
MANY_ROWS, LONG = 64, 128  # of queries, and tokens that share a scale, from which a tile of the largest would spill, as
# it does of tokens whose scales are behind them
TOKEN_BITS = (2, 4, 8)


class Form(NamedTuple):
    """How a token lies.

    Attributes:
        bits: of a code.
        tokens, channels: that share a scale; all channels where there are no more of them.
        width: channels, R.
        behind: whether the scale is the two last bytes of a token, low one first, and not in an array of its own.
    """

    bits: int
    tokens: int
    channels: int
    width: int
    behind: bool = False

    @property
    def each(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits

    @property
    def blocks(self) -> int:
        """Of `BLOCK` bytes."""
        return -(-self.width // (BLOCK * self.each))

    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the columns that come together: of a block those of the lowest bits, of the next ones, .."""
        return tuple((i * BLOCK, BLOCK) for i in range(self.blocks * self.each))

    def channels_of_pieces(self) -> list[jax.Array]:
        """The channels of each of the `pieces`, int32 `[BLOCK]`, R and beyond where there is none; within kernels."""
        byte = jnp.arange(BLOCK)
        return [(block * BLOCK + byte) * self.each + place for block in range(self.blocks) for place in range(self.each)]

    def collected(self, x: jax.Array) -> jax.Array:
        """Channels `[.., R]` of columns in the order of `pieces`."""
        lead = x.shape[:-1]
        x = x.reshape(*lead, self.blocks, self.each, BLOCK).swapaxes(-1, -2)
        return x.reshape(*lead, -1)[..., : self.width]

    def suits(self, tile: int) -> bool:
        """Whether a program can read so many tokens at once: whole tiles of a power of two, or a part of one tile."""
        power = self.tokens & (self.tokens - 1) == 0
        return self.tokens % tile == 0 or (tile % self.tokens == 0 and power)


class Tiled(NamedTuple):
    """Tokens as arrays that a kernel reads.

    Attributes:
        codes: int8 or uint8 `[B, J, S, C]`.
        scales, lows: uint16 `[B, J, tiles, groups]`, bits of bfloat16 numbers; no lows in 8 bits, no scales where
            they are behind the codes.
        starts, first: int32 `[B, H]`, slots at which tiles begin anew, and the tiles that do; None where none does.
        form: of a token.
    """

    codes: jax.Array
    scales: jax.Array | None
    lows: jax.Array | None
    starts: jax.Array | None
    first: jax.Array | None
    form: Form

    def arrays(self) -> list[jax.Array]:
        """Those that there are."""
        return [x for x in (self.codes, self.scales, self.lows) if x is not None]

    def first_tiles(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """Where each of `rows` rows, heads behind each other, begins, and its first tile, int32 `[rows, 1]`."""
        if self.starts is None or self.first is None:
            return jnp.zeros((rows, 1), jnp.int32), jnp.zeros((rows, 1), jnp.int32)
        return self.starts.reshape(rows, 1), self.first.reshape(rows, 1)


def tiled(tokens: Any, name: str) -> Tiled:
    """The arrays behind a segment's keys or values.

    Raises:
        Unsupported: another storage, or more channels than the kernel has registers for.
    """
    if isinstance(tokens, EightBits):
        width = tokens.shape[-1]
        return Tiled(tokens.rows, None, None, None, None, _checked(Form(8, 1, width, width, behind=True), name))
    bits, tile = getattr(tokens, "bits", None), getattr(tokens, "tile", None)
    if bits not in TOKEN_BITS or tile is None:
        raise Unsupported(f"{name} stored as {type(tokens).__name__}, beside others in tiles with a scale each")
    width = tokens.channels
    size, channels = (tile, 1) if isinstance(tile, int) else (tile.tokens, tile.channels or width)
    form = _checked(Form(bits, size, min(channels, width), width), name)
    if form.channels not in (1, width) and form.channels % form.each:
        raise Unsupported(f"{name}: {form.channels} channels of {bits} bits share a scale, which are no whole bytes")
    starts, first = heads_of(tokens)
    return Tiled(tokens.codes, tokens.scales, tokens.lows, starts, first, form)


def _checked(form: Form, name: str) -> Form:
    if len(form.pieces()) > MOST_PIECES:
        raise Unsupported(f"{name} of {form.width} channels in {form.bits} bits: more than registers hold")
    return form


def tile_for(rows: int, *forms: Form) -> int:
    """Tokens that a program of so many query rows reads at once.

    Raises:
        Unsupported: none of `TILES` suits all.
    """
    tiles = TILES[1:] if rows >= MANY_ROWS or any(form.tokens >= LONG or form.behind for form in forms) else TILES
    able = [tile for tile in tiles if all(form.suits(tile) for form in forms)]
    if not able:
        raise Unsupported(f"scales for {' and '.join(str(form.tokens) for form in forms)} tokens, no multiples of 16")
    return able[0]


def numbers(refs, form: Form, at, first, inside) -> Iterator[jax.Array]:
    """Tokens `at` to `at + n` in float32 `[n, BLOCK]`, for each of the `pieces`.

    Args:
        refs: to the `arrays`.
        first: the tile of the first token.
        inside: bool `[n]`, which tokens are there; scales of others may be anything.
    """
    codes_ref, *sides_refs = refs
    for block in range(form.blocks):
        codes = load_block(codes_ref, at, inside, (block * BLOCK, BLOCK)).astype(jnp.int32)
        shared = None
        for place in range(form.each):
            own = codes if form.bits == 8 else (codes >> (form.bits * place)) & (2**form.bits - 1)
            if form.behind:
                own, shared = own - 2 * (own & 128), shared or [scale_behind(codes_ref, form.width, at, inside)]
            if shared is None or form.channels == 1:  # else components of a byte share them
                shared = [_sides(ref, form, block, place, at, first, inside) for ref in sides_refs]
            scale, *low = shared
            yield sum(low, own.astype(jnp.float32) * scale)


def _sides(ref, form: Form, block: int, place: int, at, first, inside) -> jax.Array:
    """Scales or least values of a piece, float32, `[n, BLOCK]` or what broadcasts to it."""
    n, alike = inside.shape[0], form.channels // form.each  # so many bytes
    if form.channels == 1:
        groups = (block * BLOCK + jnp.arange(BLOCK)) * form.each + place
    elif form.channels == form.width:
        groups = jnp.zeros((1,), jnp.int32)
    elif BLOCK % alike == 0:
        groups = block * BLOCK // alike + jnp.arange(BLOCK // alike)
    else:
        groups = (block * BLOCK + jnp.arange(BLOCK)) // alike
    if form.tokens == 1:
        rows, there = at + jnp.arange(n), inside
    else:
        rows = first + jnp.arange(max(1, n // form.tokens))
        there = jnp.arange(rows.shape[0]) * form.tokens <= jnp.max(jnp.where(inside, jnp.arange(n), -1))
    shape = (rows.shape[0], groups.shape[0])
    where = tuple(jnp.broadcast_to(x, shape) for x in (rows[:, None], groups[None]))
    mask = jnp.broadcast_to(there[:, None] & (groups < ref.shape[1])[None], shape)
    found = jax.lax.bitcast_convert_type(plgpu.load(ref.at[where], mask=mask, other=0), jnp.bfloat16).astype(jnp.float32)
    if 1 < form.tokens < n:
        found = jnp.broadcast_to(found[:, None], (shape[0], form.tokens, shape[1])).reshape(n, shape[1])
    if 1 < shape[1] < BLOCK:
        found = jnp.broadcast_to(found[:, :, None], (*found.shape, BLOCK // shape[1])).reshape(-1, BLOCK)
    return found
