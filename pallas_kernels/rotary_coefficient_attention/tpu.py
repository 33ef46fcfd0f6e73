"""Decode attention over pre-RoPE coefficients for TPUs: keys of a tile rebuilt, and rotated by their place within it.

As in `gpu_triton`, the query is turned back by the position at which a tile begins, and a tile with a gap in its
positions is visited once for each run of consecutive ones. Where positions follow no order, keys are rotated each by its
own.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import tpu_softmax
from lowrank_kv_jax.pallas_kernels.packing import unpack
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import tiles, tpu_tiles
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import (
    Rotary,
    in_head_space,
    prepare,
    read_run,
    visits,
)
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.tpu_rotation import rotation
from lowrank_kv_jax.pallas_kernels.tpu_softmax import Step
from lowrank_kv_jax.pallas_kernels.tpu_tiled import tiled_tokens

MOST_TOKENS = 512  # of a tile: rebuilt keys and their angles are float32, head_dim numbers a token


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis, key_mean=None,
    origin=None, interpret=False,
) -> AttnPartial:
    """The op of `api.rotary_coefficient_attention`; `Unsupported` where the kernel does not cover a case."""
    if origin is not None:
        tiles.check(tokens, rope)
        if tokens.keys.shape[1] < kv_heads:  # whose codes programs of all query heads unpack once
            part = tpu_tiles.attend(
                q, tokens, key_basis, rope=rope, kv_heads=kv_heads, scale=scale, q_positions=q_positions, causal=causal,
                window=window, key_mean=key_mean, origin=origin, interpret=interpret,
            )
            return in_head_space(part, value_basis, kv_heads)
    keys, values = (_stored(getattr(tokens, x), x) for x in ("keys", "values"))
    rotary = prepare(
        q, tokens, key_basis, rope=rope, kv_heads=kv_heads, q_positions=q_positions, causal=causal, window=window,
        key_mean=key_mean,
    )
    rows = rotary.packed.q.shape[2]
    rotary = rotary._replace(packed=tpu_softmax.padded(rotary.packed), basis=keys.spread(rotary.basis))
    tile = min(tpu_softmax.tile_of(keys.slots, keys, values), max(MOST_TOKENS, keys.least, values.least))
    tile = tile if origin is None else tpu_tiles.tile_of(keys, values)
    way = rotation(rotary, rope, q.shape[-1], tile)
    out, lse = attend_packed(
        rotary, keys, values, way, tile=tile, scale=scale, turned=origin is not None, interpret=interpret
    )
    part = unpack(AttnPartial(out[:, :, :rows], lse[:, :, :rows]), q.shape[1])
    return in_head_space(part, value_basis, kv_heads)


def _stored(tokens: Any, name: str) -> Any:
    """Keys or values as a kernel reads them; `Unsupported` where none does."""
    return tiled_tokens(tokens) or tpu_softmax.lane_tokens(tokens, name)


def attend_packed(
    rotary: Rotary, keys: Any, values: Any, way: Any, *, tile: int, scale: float, turned: bool, interpret: bool
) -> AttnPartial:
    """Partial `[B, K, M, Rv]`, lse `EMPTY` where a row sees nothing; `rotary` padded, `way` of `rotation`.

    Args:
        turned: whether keys but for their mean are stored turned by their place within the tile, so that it is queries
            that meet the basis.
    """
    packed, runs = rotary.packed, rotary.runs
    (batch, heads, rows, _), size, width = packed.q.shape, keys.slots, values.width
    steps = pl.cdiv(size, tile) + runs - 1
    most = pl.cdiv(size, tile) - 1

    def near(i, b, table):  # a step beyond the last visit repeats its tile, which is not read again
        visit = jnp.minimum(i, jnp.maximum(table[b, 5 * runs] - 1, 0))
        return jnp.minimum(read_run(lambda at: table[b, at], runs, visit).tile, most)

    def per_head(lanes):
        return pl.BlockSpec((None, None, rows, lanes), lambda b, h, i, table: (b, h, 0, 0))

    per_row = pl.BlockSpec((None, rows, 1), lambda b, h, i, table: (b, 0, 0))

    def of_head(x):
        shared = x.shape[0] == 1
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, i, table: (0 if shared else b, h, 0, 0))

    of_bases = [rotary.basis] if rotary.mean is None else [rotary.basis, rotary.mean[..., None]]
    tables, of_tables = ([], []) if way is None else (way.arrays(interpret), way.specs(near))
    specs = [spec for x in (keys, values) for spec in x.specs(batch, heads, tile, near)]
    arrays = [array for x in (keys, values) for array in x.arrays(tile)]
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, stored=(keys, values), tile=tile, runs=runs, scale=scale, way=way,
            centred=rotary.mean is not None, turned=turned,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, steps),
            in_specs=[
                per_row, per_row, per_head(packed.q.shape[3]), *map(of_head, of_bases), *specs, *of_tables,
            ],
            out_specs=[per_head(width), per_head(1)],
            scratch_shapes=tpu_softmax.scratch(rows, width),
        ),
        out_shape=tpu_softmax.partial_shape(batch, heads, rows, width),
        compiler_params=tpu_softmax.memory_for(tile, keys, values, packed.q.dtype.itemsize),
        interpret=tpu_softmax.interpreter(interpret),
        name="rotary_coefficient_attention",
    )(
        visits(rotary, tile), packed.begin, packed.end, packed.q, *of_bases,
        *tpu_softmax.where_they_lie(arrays, interpret), *tables,
    )
    return AttnPartial(values.collected(out), lse[..., 0])


def _kernel(
    table_ref, begin_ref, end_ref, q_ref, basis_ref, *refs, stored, tile: int, runs: int, scale: float, way: Any,
    centred: bool, turned: bool,
):
    refs = list(refs)
    mean_ref = refs.pop(0) if centred else None
    stored_keys, stored_values = (x.tile(refs, tile) for x in stored)
    *tables, out_ref, lse_ref, top_ref, total_ref, acc_ref = refs
    state, dtype, half = (top_ref, total_ref, acc_ref), q_ref.dtype, basis_ref.shape[0] // 2
    row, i = pl.program_id(0), pl.program_id(2)
    pl.when(i == 0)(lambda: tpu_softmax.start(*state))

    @pl.when(i < table_ref[row, 5 * runs])
    def _():
        run = read_run(lambda at: table_ref[row, at], runs, i)
        slots = tpu_softmax.slots_of(run.tile, tile)
        mine = (slots >= run.low) & (slots < run.high)
        step = Step(run.tile, tile, slots, run.high, lambda column: table_ref[row, column])
        codes, values = stored_keys.at(step), stored_values.at(step)
        sides = [slice(side * half, (side + 1) * half) for side in range(2)]
        if turned:
            keys = tuple(jnp.zeros((half, tile), jnp.float32) for _ in sides)
        else:
            keys = tuple(codes.of_tokens(basis_ref[side], mine) for side in sides)
        if mean_ref is not None:
            keys = tuple(x + mean_ref[side] for x, side in zip(keys, sides, strict=True))
        query = tuple(q_ref[:, side].astype(jnp.float32) for side in sides)
        if way is not None:
            keys, query = way.rotated(tables, keys, query, run.tile * tile + run.offset)
        logits = _products(query, keys, dtype)
        if turned:
            logits += codes.of_tokens(_products(query, [basis_ref[side] for side in sides], dtype).astype(dtype), mine)
        visible = mine & (slots >= begin_ref[...]) & (slots < end_ref[...])
        tpu_softmax.add_tile(logits * scale, visible, values, mine, dtype, *state)

    pl.when(i == pl.num_programs(2) - 1)(lambda: tpu_softmax.finish(out_ref, lse_ref, *state))


def _products(query, keys, dtype):
    """Float32, of both halves of queries `[M, H]` and keys `[H, n]`."""
    return sum(tpu_softmax.dot(x.astype(dtype), k.astype(dtype), (1, 0)) for x, k in zip(query, keys, strict=True))
