"""Chunks that were coded before RoPE, for TPUs: a page's keys are rebuilt in its own basis and rotated where they are.

As in the kernel of `rotary_coefficient_attention`, keys are rotated by their place, here within their page, and queries
turned back by the position at which the page begins, once for each run of positions that a row has. A grid step reads
some pages and the basis of each: the kernel is told which before, so that bases in use alone are fetched.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import tpu_softmax
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import pack, unpack, visible_range
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import (
    channel_pairs,
    digit_tables,
    position_angle,
    turn,
)
from lowrank_kv_jax.pallas_kernels.tpu_softmax import LaneTokens, dot
from lowrank_kv_jax.storage.chunk_bases import ChunkBases

TOGETHER = 8  # pages of a grid step at the most
MOST_NUMBERS = 1 << 16  # of owners that a program is told: it keeps them in scalar memory


class Shape(NamedTuple):
    """What a kernel is made for.

    Attributes:
        page: tokens of a page.
        pages: of a grid step.
        runs: of consecutive positions.
        scale: of the logits.
    """

    page: int
    pages: int
    runs: int
    scale: float

    @property
    def tile(self) -> int:
        """Tokens of a grid step."""
        return self.page * self.pages

    @property
    def owners(self) -> int:
        """The column of a row's numbers where the owners of its pages begin, behind its span and its runs."""
        return 2 + 2 * self.runs


def chunked_attention(
    q, tokens, owner, k_bases, v_bases, *, page, rope, kv_heads, scale, q_positions, window, interpret
) -> AttnPartial:
    """The op of `api.chunked_attention` with a `rope`; `Unsupported` where the kernel does not cover a case."""
    keys, values = (tpu_softmax.lane_tokens(getattr(tokens, x), x) for x in ("keys", "values"))
    pairs = channel_pairs(rope, q.shape[-1])
    _check(keys, values, owner, k_bases, v_bases, page, kv_heads)
    if not np.array_equal([*pairs.first, *pairs.second], np.arange(2 * pairs.padded)):
        raise Unsupported("chunks that were coded before RoPE of other than whole heads of a power of two of channels")
    packed = pack(q, kv_heads, *visible_range(tokens, q_positions, False, window))
    rows = packed.q.shape[2]
    first, offset = tokens.positions.pieces()
    shape = Shape(page, min(TOGETHER, owner.shape[1]), first.shape[1], scale)
    bases = [x.part(0, x.capacity, x.codes.dtype, by_rows=True) for x in (k_bases, v_bases)]
    out, lse = _attend(
        tpu_softmax.padded(packed), keys, values, jnp.concatenate([packed.span, first, offset, owner], axis=1), bases,
        _tables(pairs.frequency, page), [jnp.asarray(x) for x in digit_tables(rope, q.shape[-1])], shape, interpret,
    )
    return unpack(AttnPartial(out[:, :, :rows], lse[:, :, :rows]), q.shape[1])


def _check(
    keys: LaneTokens, values: LaneTokens, owner: jax.Array, k_bases: ChunkBases, v_bases: ChunkBases, page: int,
    kv_heads: int,
) -> None:
    if page % tpu_softmax.LANES:
        raise Unsupported(f"chunks that were coded before RoPE in pages of {page} tokens, no multiple of 128")
    if not keys.heads == values.heads == kv_heads:
        raise Unsupported("chunks that were coded before RoPE in bases that heads share")
    for x in (k_bases, v_bases):
        if x.scales is not None or x.heads is not None:
            raise Unsupported("chunks that were coded before RoPE in bases that are no plain floats")
    if any(x.scales is not None or x.runs is not None for x in (keys, values)):
        raise Unsupported("chunks that were coded before RoPE, in fewer bits than floats")
    if owner.size > MOST_NUMBERS:
        raise Unsupported(f"{owner.size} pages of all rows: scalar memory is for {MOST_NUMBERS}")


def _tables(frequency: np.ndarray, page: int) -> list[jax.Array]:
    """cos and sin of the places within a page, float32 `[H, page]`, from float64."""
    turns = frequency[:, None] * np.arange(page)
    return [jnp.asarray(f(turns), jnp.float32) for f in (np.cos, np.sin)]


def _attend(packed, keys: LaneTokens, values: LaneTokens, told, bases, places, digits, shape: Shape, interpret: bool):
    """Partial `[B, K, M, D]` and `[B, K, M]`, lse `EMPTY` where a row sees nothing; `packed` padded."""
    (batch, heads, rows, width), tile = packed.q.shape, shape.tile
    count, most = told.shape[1] - shape.owners, pl.cdiv(keys.slots, tile)

    def near(i, b, table):  # a step beyond the valid tokens repeats the last tile, which is not read again
        first = table[b, 0] // tile
        return jnp.minimum(first + i, jnp.maximum(pl.cdiv(table[b, 1], tile) - 1, first))

    def of_basis(x: jax.Array, place: int) -> pl.BlockSpec:
        def where(b, h, i, table):
            page = jnp.minimum(near(i, b, table) * shape.pages + place, count - 1)
            return b, jnp.clip(table[b, shape.owners + page], 0, x.shape[1] - 1), h, 0, 0

        return pl.BlockSpec((None, None, None, *x.shape[3:]), where)

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda b, h, i, table: (0,) * x.ndim)

    def per_head(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, rows, lanes), lambda b, h, i, table: (b, h, 0, 0))

    per_row = pl.BlockSpec((None, rows, 1), lambda b, h, i, table: (b, 0, 0))
    stored = [spec for x in (keys, values) for spec in x.specs(batch, heads, tile, near)]
    of_pages = [(x, of_basis(x, place)) for x in bases for place in range(shape.pages)]
    tables = [*places, *digits]
    arrays = [keys.data, values.data, *(x for x, _ in of_pages)]
    out, lse = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, most),
            in_specs=[
                per_row, per_row, per_head(width), *map(whole, tables), *stored, *(spec for _, spec in of_pages),
            ],
            out_specs=[per_head(width), per_head(1)],
            scratch_shapes=tpu_softmax.scratch(rows, width),
        ),
        out_shape=tpu_softmax.partial_shape(batch, heads, rows, width),
        compiler_params=tpu_softmax.TILES_IN_ORDER,
        interpret=tpu_softmax.interpreter(interpret),
        name="chunked_attention",
    )(told, packed.begin, packed.end, packed.q, *tables, *tpu_softmax.where_they_lie(arrays, interpret))
    return out, lse[..., 0]


def _kernel(
    table_ref, begin_ref, end_ref, q_ref, place_cos_ref, place_sin_ref, cos_ref, sin_ref, keys_ref, values_ref, *refs,
    shape: Shape,
):
    pages = shape.pages
    k_refs, v_refs, (out_ref, lse_ref, *state) = refs[:pages], refs[pages : 2 * pages], refs[2 * pages :]
    row, i = pl.program_id(0), pl.program_id(2)
    low, high = table_ref[row, 0], table_ref[row, 1]
    this, runs = low // shape.tile + i, range(shape.runs)
    first, offset = ([table_ref[row, 2 + kind * shape.runs + run] for run in runs] for kind in range(2))
    pl.when(i == 0)(lambda: tpu_softmax.start(*state))

    @pl.when(this * shape.tile < high)
    def _():
        slots, half, dtype = tpu_softmax.slots_of(this, shape.tile), q_ref.shape[1] // 2, q_ref.dtype
        query = tuple(q_ref[:, side].astype(jnp.float32) for side in (slice(0, half), slice(half, 2 * half)))
        parts = []
        for place, basis_ref in enumerate(k_refs):
            own = slice(place * shape.page, (place + 1) * shape.page)
            key = dot(basis_ref[...].astype(dtype), keys_ref[:, own].astype(dtype), (0, 0))
            key = turn(key[:half], key[half:], place_cos_ref[...], place_sin_ref[...])
            key = jnp.concatenate(key, axis=0).astype(dtype)
            begin = this * shape.tile + place * shape.page
            logits = None
            for run in runs:
                cos, sin = position_angle(cos_ref, sin_ref, jnp.maximum(begin + offset[run], 0))
                turned = jnp.concatenate(turn(*query, cos, -sin), axis=1).astype(dtype)
                of_run = dot(turned, key, (1, 0))
                logits = of_run if logits is None else jnp.where(slots[:, own] >= first[run], of_run, logits)
            parts.append(logits)
        logits = jnp.concatenate(parts, axis=1) * shape.scale
        inside = slots < high
        visible = (slots >= begin_ref[...]) & (slots < end_ref[...])
        values = _Values(values_ref, v_refs, shape)
        tpu_softmax.add_tile(logits, visible, values, inside, dtype, *state)

    pl.when(i == pl.num_programs(2) - 1)(lambda: tpu_softmax.finish(out_ref, lse_ref, *state))


class _Values(NamedTuple):
    """A grid step's values `[R, tokens]`, and the basis `[R, D]` of each page."""

    data: jax.Array
    bases: tuple[jax.Array, ...]
    shape: Shape

    def add_weighted(self, acc_ref, shrink: jax.Array, weights: jax.Array, inside: jax.Array) -> None:
        """As `tpu_softmax.Tile.add_weighted`, in head space."""
        total = acc_ref[...] * shrink
        for place, basis_ref in enumerate(self.bases):
            own = slice(place * self.shape.page, (place + 1) * self.shape.page)
            data = self.data[:, own].astype(weights.dtype)
            summed = dot(weights[:, own], jnp.where(inside[:, own], data, jnp.zeros_like(data)), (1, 1))
            total += dot(summed.astype(weights.dtype), basis_ref[...].astype(weights.dtype), (1, 0))
        acc_ref[...] = total
