"""Decode attention over coefficients for TPUs: tokens on the lanes, one pass over the tokens of each kv head."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import tpu_softmax
from lowrank_kv_jax.pallas_kernels.owned_slots import numbers
from lowrank_kv_jax.pallas_kernels.packing import pack, unpack
from lowrank_kv_jax.pallas_kernels.tpu_softmax import LaneTokens


def attend_slots(
    q, tokens, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None
) -> AttnPartial:
    """Queries `[B, T, N, Rk]` over the slots `begin <= slot < end` `[B, T]` of tokens that B / B' rows in order share.

    Args:
        size: most tokens that a row sees, from the tile of its first one on: the grid has steps for no more.
        owner: see `owned_slots.Rows`.
    """
    keys, values = (tpu_softmax.lane_tokens(getattr(tokens, x), x) for x in ("keys", "values"))
    packed = pack(q, max(keys.data.shape[1], values.data.shape[1]), begin, end)
    rows = packed.q.shape[2]
    packed = packed._replace(q=keys.spread(packed.q))
    part = attend_packed(
        tpu_softmax.padded(packed), keys, values, scale=scale, size=size, interpret=interpret, owner=owner
    )
    return unpack(AttnPartial(part.out[:, :, :rows], part.lse[:, :, :rows]), q.shape[1])


def attend_packed(
    packed, keys: LaneTokens, values: LaneTokens, *, scale: float, size: int, interpret: bool,
    owner: jax.Array | None = None,
) -> AttnPartial:
    """Partial `[B, H, M, Rv]`, lse `EMPTY` where a row sees nothing; `packed` padded."""
    (batch, heads, rows, _), width = packed.q.shape, values.width
    tile = tpu_softmax.tile_of(size, keys, values)
    # fewer than all slots may begin within a tile and end in another
    tiles = pl.cdiv(size, tile) + (size < keys.data.shape[3])

    def near(i, b, span):  # a step beyond the valid tokens repeats the last tile, which is not read again
        first = span[b, 0] // tile
        return jnp.minimum(first + i, jnp.maximum(pl.cdiv(span[b, 1], tile) - 1, first))

    per_row = pl.BlockSpec((None, rows, 1), lambda b, h, i, span: (b, 0, 0))

    def per_head(lanes):
        return pl.BlockSpec((None, None, rows, lanes), lambda b, h, i, span: (b, h, 0, 0))

    span, owners, owned = packed.span, [], []
    if owner is not None:
        span = jnp.concatenate([span, numbers(batch, owner)], axis=1)
        share, owners = batch // owner.shape[0], [owner]
        owned = [pl.BlockSpec((None, 1, tile), lambda b, h, i, span: (b // share, 0, near(i, b, span)))]
    specs = [spec for x in (keys, values) for spec in tpu_softmax.stored_specs(x, batch, heads, tile, near)]
    out, lse = pl.pallas_call(
        functools.partial(_kernel, stored=(keys, values), tile=tile, scale=scale, owned=owner is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, tiles),
            in_specs=[per_row, per_row, per_head(packed.q.shape[3]), *owned, *specs],
            out_specs=[per_head(width), per_head(1)],
            scratch_shapes=tpu_softmax.scratch(rows, width),
        ),
        out_shape=tpu_softmax.partial_shape(batch, heads, rows, width),
        compiler_params=tpu_softmax.TILES_IN_ORDER,
        interpret=tpu_softmax.interpreter(interpret),
        name="coefficient_attention",
    )(span, packed.begin, packed.end, packed.q, *owners, *tpu_softmax.given(keys), *tpu_softmax.given(values))
    return AttnPartial(values.collected(out), lse[..., 0])


def _kernel(span_ref, begin_ref, end_ref, q_ref, *refs, stored, tile: int, scale: float, owned: bool):
    (owner_ref, *refs) = refs if owned else (None, *refs)
    (keys, values), (out_ref, lse_ref, *state) = tpu_softmax.split_refs(refs, *stored)
    row, i = pl.program_id(0), pl.program_id(2)
    low, high = span_ref[row, 0], span_ref[row, 1]
    this = low // tile + i
    pl.when(i == 0)(lambda: tpu_softmax.start(*state))

    @pl.when(this * tile < high)
    def _():
        slots = tpu_softmax.slots_of(this, tile)
        inside = slots < high
        visible = (slots >= begin_ref[...]) & (slots < end_ref[...])
        if owner_ref is not None:
            visible &= owner_ref[...].astype(jnp.int32) == span_ref[row, 2]
        logits = keys.of_tokens(q_ref[...], inside) * scale
        tpu_softmax.add_tile(logits, visible, values, inside, q_ref.dtype, *state)

    pl.when(i == pl.num_programs(2) - 1)(lambda: tpu_softmax.finish(out_ref, lse_ref, *state))
