"""Decode attention over coefficients for TPUs: tokens on the lanes, one pass over the tokens of each kv head."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.pallas_kernels import tpu_softmax
from lowrank_kv_jax.pallas_kernels.packing import pack, unpack, visible_range
from lowrank_kv_jax.partial import AttnPartial

TILE_BYTES = 1 << 20  # of keys and values that a grid step reads: far more than the step's own cost


def coefficient_attention(q, tokens, *, scale, q_positions, causal, window, interpret=False) -> AttnPartial:
    """The op of `api.coefficient_attention`; `Unsupported` where the kernel does not cover a case."""
    return attend_slots(
        q, tokens, *visible_range(tokens, q_positions, causal, window), scale=scale, size=tokens.keys.shape[2],
        interpret=interpret,
    )


def attend_slots(q, tokens, begin, end, *, scale: float, size: int, interpret: bool) -> AttnPartial:
    """Queries `[B, T, N, Rk]` over the slots `begin <= slot < end` `[B, T]` of tokens that B / B' rows in order share.

    Args:
        size: most tokens that a row sees, from the tile of its first one on: the grid has steps for no more.
    """
    keys, values = (tpu_softmax.tokens_on_lanes(getattr(tokens, x), x) for x in ("keys", "values"))
    packed = pack(q, max(keys.shape[1], values.shape[1]), begin, end)
    rows = packed.q.shape[2]
    part = attend_packed(tpu_softmax.padded(packed), keys, values, scale=scale, size=size, interpret=interpret)
    return unpack(AttnPartial(part.out[:, :, :rows], part.lse[:, :, :rows]), q.shape[1])


def tile_of(size: int, *buffers: jax.Array) -> int:
    """Tokens of a grid step over buffers of `size` slots."""
    token = sum(x.shape[2] * x.dtype.itemsize for x in buffers)
    tile = tpu_softmax.LANES
    while 2 * tile * token <= TILE_BYTES and tile < size:
        tile *= 2
    return tile


def attend_packed(
    packed, keys: jax.Array, values: jax.Array, *, scale: float, size: int, interpret: bool
) -> AttnPartial:
    """Partial `[B, H, M, Rv]`, lse `EMPTY` where a row sees nothing; `packed` padded, keys and values `[B, J, R, S]`."""
    (batch, heads, rows, _), width = packed.q.shape, values.shape[2]
    tile = tile_of(size, keys, values)
    tiles = pl.cdiv(size, tile) + (size < keys.shape[3])  # fewer than all may begin within a tile and end in another

    def near(i, b, span):  # a step beyond the valid tokens repeats the last tile, which is not read again
        first = span[b, 0] // tile
        return jnp.minimum(first + i, jnp.maximum(pl.cdiv(span[b, 1], tile) - 1, first))

    def stored(x):
        share, shared = batch // x.shape[0], heads // x.shape[1]
        return pl.BlockSpec(
            (None, None, x.shape[2], tile), lambda b, h, i, span: (b // share, h // shared, 0, near(i, b, span))
        )

    per_row = pl.BlockSpec((None, rows, 1), lambda b, h, i, span: (b, 0, 0))

    def per_head(lanes):
        return pl.BlockSpec((None, None, rows, lanes), lambda b, h, i, span: (b, h, 0, 0))

    out, lse = pl.pallas_call(
        functools.partial(_kernel, tile=tile, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, tiles),
            in_specs=[per_row, per_row, per_head(packed.q.shape[3]), stored(keys), stored(values)],
            out_specs=[per_head(width), per_head(1)],
            scratch_shapes=tpu_softmax.scratch(rows, width),
        ),
        out_shape=tpu_softmax.partial_shape(batch, heads, rows, width),
        compiler_params=tpu_softmax.TILES_IN_ORDER,
        interpret=tpu_softmax.interpreter(interpret),
        name="coefficient_attention",
    )(packed.span, packed.begin, packed.end, packed.q, keys, values)
    return AttnPartial(out, lse[..., 0])


def _kernel(span_ref, begin_ref, end_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *state, tile: int, scale: float):
    row, i = pl.program_id(0), pl.program_id(2)
    low, high = span_ref[row, 0], span_ref[row, 1]
    this = low // tile + i
    pl.when(i == 0)(lambda: tpu_softmax.start(*state))

    @pl.when(this * tile < high)
    def _():
        slots = tpu_softmax.slots_of(this, tile)
        logits = tpu_softmax.dot(q_ref[...], k_ref[...].astype(q_ref.dtype), (1, 0)) * scale
        visible = (slots >= begin_ref[...]) & (slots < end_ref[...])
        tpu_softmax.add_tile(logits, visible, v_ref[...].astype(q_ref.dtype), slots < high, *state)

    pl.when(i == pl.num_programs(2) - 1)(lambda: tpu_softmax.finish(out_ref, lse_ref, *state))
