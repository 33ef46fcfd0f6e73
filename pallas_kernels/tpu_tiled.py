"""Tokens in 2, 4 or 8 bits with a scale for each tile of tokens and channels, as TPU kernels unpack them.

Codes lie on lanes (`storage.tiles_on_lanes`), so that a few shifts give all channels of many tokens, in planes: queries
come in their order, and sums leave in it. Scales are spread over them by products with matrices of zeros and ones, which
are exact.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_kv_jax.pallas_kernels.tpu_softmax import LANES, TILE_BYTES, Step, dot, widened
from lowrank_kv_jax.storage.packed import heads_of
from lowrank_kv_jax.storage.tiles_on_lanes import (
    CodesOnLanes,
    GroupedOnLanes,
    PackedOnLanes,
    TiledOnLanes,
    from_planes,
    groups_of,
    in_planes,
)

ROWS = 16  # of bfloat16 scales that a register holds
PART = 512  # tokens that are unpacked together, into float32


class Form(NamedTuple):
    """How a token lies.

    Attributes:
        bits: of a code.
        width: channels that there is room for, in planes.
        tokens: that share a scale, each channel its own; 1 where a token has scales of its own.
        group: channels that share one then.
        begins: whether tiles begin anew with each head.
    """

    bits: int
    width: int
    tokens: int
    group: int
    begins: bool = False

    def rows(self, tile: int) -> int:
        """Rows of scales that come together: as many as `tile` tokens may have, in whole registers."""
        return -(-tile // (self.tokens * ROWS)) * ROWS

    def blocks(self, tile: int) -> int:
        """In how many blocks of so many rows the scales of a grid step may lie."""
        return 1 if self.tokens == 1 or (not self.begins and self.rows(tile) * self.tokens == tile) else 2


class TiledTokens(NamedTuple):
    """Tokens as arrays that a kernel reads; as `tpu_softmax.LaneTokens`.

    Attributes:
        codes: int8 or uint8 `[B, J, C, S]`.
        sides: scales and least values (none in 8 bits) `[B, J, tiles, width]`, or both in one `[B, J, Q, S]`: uint16,
            the bits of bfloat16 numbers.
        starts, first: int32 `[B, H]`, slots at which tiles begin anew, and the tiles that do; None where none does.
        form: of a token.
        order: of its channels, what `in_planes` and `from_planes` take.
        column: of a row's numbers, where its own begin: the first slot and the first tile of its head.
    """

    codes: jax.Array
    sides: tuple[jax.Array, ...]
    starts: jax.Array | None
    first: jax.Array | None
    form: Form
    order: CodesOnLanes
    column: int = 0

    @property
    def heads(self) -> int:
        return self.codes.shape[1]

    @property
    def slots(self) -> int:
        return self.codes.shape[3]

    @property
    def width(self) -> int:
        return self.form.width

    @property
    def token_bytes(self) -> int:
        return self.codes.shape[2] + sum(x[:1, :1].size * 2 for x in self.sides) // self.slots

    @property
    def least(self) -> int:
        """Tokens of a grid step at the least: a register's rows of scales."""
        return LANES if self.form.tokens == 1 else -(-ROWS * self.form.tokens // LANES) * LANES

    @property
    def most_bytes(self) -> int:
        return TILE_BYTES // 8  # they are unpacked as int32 and float32

    def spread(self, x: jax.Array) -> jax.Array:
        return in_planes(x, self.order)

    def collected(self, x: jax.Array) -> jax.Array:
        return from_planes(x, self.order)

    def numbers(self, rows: int) -> jax.Array:
        """What the steps of each row are told, int32 `[rows, n]`: of which its head's first slot and its first tile."""
        if self.starts is None or self.first is None:
            return jnp.zeros((rows, 0), jnp.int32)
        return jnp.stack([self.starts.reshape(rows), self.first.reshape(rows)], axis=1)

    def arrays(self, tile: int) -> list[jax.Array]:
        return [self.codes, *(x for x in self.sides for _ in range(self.form.blocks(tile)))]

    def specs(self, batch: int, heads: int, tile: int, at) -> list[pl.BlockSpec]:
        share, shared = batch // self.codes.shape[0], heads // self.heads

        def on_lanes(x: jax.Array) -> pl.BlockSpec:
            return pl.BlockSpec(
                (None, None, x.shape[2], tile), lambda b, h, i, table: (b // share, h // shared, 0, at(i, b, table)))

        codes, form = on_lanes(self.codes), self.form
        if form.tokens == 1:
            return [codes, *map(on_lanes, self.sides)]
        rows, blocks = form.rows(tile), form.blocks(tile)

        def in_rows(x: jax.Array, block: int) -> pl.BlockSpec:
            last = pl.cdiv(x.shape[2], rows) - 1

            def where(b, h, i, table):
                begin = self._begin(lambda column: table[b, column], at(i, b, table), tile)
                return b // share, h // shared, jnp.minimum(begin + block, last), 0

            return pl.BlockSpec((None, None, rows, form.width), where)

        return [codes, *(in_rows(x, block) for x in self.sides for block in range(blocks))]

    def tile(self, refs: list[Any], size: int) -> "Tile":
        codes, blocks = refs.pop(0), self.form.blocks(size)
        return Tile(self, codes, tuple(tuple(refs.pop(0) for _ in range(blocks)) for _ in self.sides))

    def first_row(self, step: Step):
        """Of a step: where its head begins, and the slot at which the tile of its first row of scales would, had the
        head so many."""
        origin, first = self._head(step.read)
        row = self._begin(step.read, step.number, step.size) * self.form.rows(step.size)
        return origin, origin + (row - first) * self.form.tokens

    def _head(self, read):
        """First slot and first tile of a row's head."""
        return (0, 0) if self.starts is None else (read(self.column), read(self.column + 1))

    def _begin(self, read, number, tile: int):
        """The block of scales in which those of a grid step begin."""
        if self.form.blocks(tile) == 1:
            return number
        origin, first = self._head(read)
        return (first + jnp.maximum(number * tile - origin, 0) // self.form.tokens) // self.form.rows(tile)


class Tile(NamedTuple):
    """References to a grid step's codes `[C, tokens]` and to blocks of each of its sides.

    Attributes:
        tokens: whose they are.
        step: set by `at`.
    """

    tokens: TiledTokens
    codes: Any
    sides: tuple[tuple[Any, ...], ...]
    step: Any = None

    @property
    def form(self) -> Form:
        return self.tokens.form

    def at(self, step: Step) -> "Tile":
        """As `tpu_softmax.Tile.at`."""
        return self._replace(step=step)

    def of_tokens(self, factor: jax.Array, inside: jax.Array) -> jax.Array:
        """As `tpu_softmax.Tile.of_tokens`."""
        parts = [dot(factor, x.astype(factor.dtype), (1, 0)) for _, x in self._parts(inside)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def add_weighted(self, acc_ref, shrink: jax.Array, weights: jax.Array, inside: jax.Array) -> None:
        """As `tpu_softmax.Tile.add_weighted`."""
        total = acc_ref[...] * shrink
        for part, x in self._parts(inside):
            total += dot(weights[:, part], x.astype(weights.dtype), (1, 1))
        acc_ref[...] = total

    def _parts(self, inside: jax.Array) -> Iterator[tuple[slice, jax.Array]]:
        """Lanes and float32 `[R, tokens]` of some tokens after the others; finite everywhere."""
        spread = self._of_groups() if self.form.tokens == 1 else self._of_rows()
        for begin in range(0, self.step.size, PART):
            part = slice(begin, min(begin + PART, self.step.size))
            scale, *low = spread(part, inside[:, part])
            x = self._unpacked(part) * scale
            yield part, x + low[0] if low else x

    def _unpacked(self, part: slice) -> jax.Array:
        """Codes of a part, float32 `[R, tokens]`."""
        codes, bits = self.codes[:, part].astype(jnp.int32), self.form.bits
        if bits < 8:
            planes = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
            codes = jnp.concatenate(planes, axis=0)
        return codes.astype(jnp.float32)

    def _of_groups(self):
        """What spreads the scales of a part's tokens over their channels."""
        form, ((side,),), channels = self.form, self.sides, self.tokens.order.channels
        groups, each, rows = groups_of(channels, form.group), 8 // form.bits, self.codes.shape[0]
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (form.width, side.shape[0]), axis) for axis in range(2))
        plane = sum((row >= rows * number).astype(jnp.int32) for number in range(1, each)) if each > 1 else 0
        channel = (row - rows * plane) * each + plane

        def of_kind(kind: int) -> jax.Array:
            first = (column - kind * groups) * form.group  # channel of the group
            mine = (channel >= first) & (channel < first + form.group)
            return jnp.where(mine & (column >= kind * groups) & (column < (kind + 1) * groups), 1.0, 0.0)

        matrices = [of_kind(kind).astype(jnp.bfloat16) for kind in range(1 if form.bits == 8 else 2)]

        def spread(part: slice, inside: jax.Array) -> list[jax.Array]:
            own = jnp.where(inside, widened(side[:, part]), 0.0).astype(jnp.bfloat16)
            return [dot(matrix, own, (1, 0)) for matrix in matrices]

        return spread

    def _of_rows(self):
        """The same of scales that tokens share: of rows without a valid token they may be anything."""
        tokens, rows = self.form.tokens, self.form.rows(self.step.size) * len(self.sides[0])
        origin, begin = self.tokens.first_row(self.step)
        first = begin + tokens * jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        held = (first < self.step.high) & (first >= origin)
        sides = []
        for blocks in self.sides:
            side = jnp.concatenate([widened(ref[...]) for ref in blocks], axis=0)
            sides.append(jnp.where(held, side, 0.0).astype(jnp.bfloat16))

        def spread(part: slice, inside: jax.Array) -> list[jax.Array]:
            slots = self.step.slots[:, part]
            matrix = jnp.where((slots >= first) & (slots < first + tokens), 1.0, 0.0).astype(jnp.bfloat16)
            return [dot(side, matrix, (0, 0)) for side in sides]

        return spread


def tiled_tokens(tokens: Any) -> TiledTokens | None:
    """The buffers behind keys or values; None of another storage."""
    if not isinstance(tokens, TiledOnLanes | PackedOnLanes | GroupedOnLanes):
        return None
    codes, width = tokens.codes, tokens.codes.on_lanes.shape[2] * 8 // tokens.codes.bits
    if isinstance(tokens, GroupedOnLanes):
        sides, form = [tokens.sides], Form(codes.bits, width, 1, tokens.group)
    else:
        sides = [tokens.scales] if tokens.lows is None else [tokens.scales, tokens.lows]
        begins = isinstance(tokens, PackedOnLanes)
        form = Form(codes.bits, width, tokens.tile if begins else tokens.tile.tokens, 1, begins)
    return TiledTokens(codes.on_lanes, tuple(sides), *heads_of(tokens), form, codes)
