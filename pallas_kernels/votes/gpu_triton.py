"""Votes on a GPU: a Pallas kernel in its Triton dialect, which reads the keys and writes votes, in place.

Programs and splits are those of attention. What XLA does instead are products of all query heads with all tokens, also
where each head owns but some, and their logits in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import coefficient_grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    Limits,
    load_block,
    load_ranges,
    logits_of,
    tile_range,
    visible_slots,
)
from lowrank_kv_jax.pallas_kernels.owned_slots import numbers, rows_of
from lowrank_kv_jax.pallas_kernels.packing import LOG2_E, Stored, columns, pack
from lowrank_kv_jax.storage.cached_tokens import Beside

DTYPES = ("float32", "bfloat16", "float16")


def add_votes(votes: jax.Array, asked: Beside, lse: jax.Array, *, scale: float, interpret: bool) -> jax.Array:
    """As `api.add_votes`, of one.

    Raises:
        Unsupported: keys that are no array of numbers or of other heads than the votes, more rows of queries than a
            program takes, and what `rows_of` refuses.
    """
    told = asked.q_positions, asked.causal, asked.window
    rows, keys = rows_of(asked.q, asked.tokens, *told), asked.tokens.keys
    if not isinstance(keys, jax.Array) or keys.dtype.name not in DTYPES or keys.shape[1] != votes.shape[1]:
        raise Unsupported("keys that are no array of numbers, or of other heads than the votes")
    packed, total = (pack(x, keys.shape[1], rows.begin, rows.end)
                     for x in (rows.q, rows_of(lse[..., None], asked.tokens, *told).q))
    batch, heads, count, _ = packed.q.shape
    grid = decode_grid(count, batch * heads, keys.shape[2], keys.shape[3] * keys.dtype.itemsize)
    grid = coefficient_grid(grid, Stored(keys, None), Stored(keys[..., :0], None), packed.q.dtype.itemsize)
    told = packed.begin, packed.end, *([] if rows.owner is None else [numbers(batch, rows.owner)])
    operands = by_head(packed, rows.owner, packed.q, total.q[..., 0], keys, votes)
    arrays, specs = zip(*((x, row_spec(x, batch)) for x in told), *operands, strict=True)
    return pl.pallas_call(
        functools.partial(_kernel, grid=grid, scale=scale, owned=rows.owner is not None),
        grid=(grid.splits, heads, batch),
        in_specs=specs,
        out_specs=specs[-1],
        out_shape=jax.ShapeDtypeStruct(votes.shape, votes.dtype),
        input_output_aliases={len(arrays) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name="votes",
    )(*arrays)


def _kernel(begin_ref, end_ref, *refs, grid: Grid, scale: float, owned: bool):
    (number_ref, owner_ref, *refs) = refs if owned else (None, None, *refs)
    q_ref, lse_ref, k_ref, old_ref, out_ref = refs
    limits, number = Limits(begin_ref, end_ref, (), None), number_ref[0] if owned else None
    pieces, row = columns(k_ref.shape[-1]), jnp.arange(grid.rows)
    there = row < q_ref.shape[0]
    begin, end = load_ranges(limits, grid.rows, q_ref.shape[0])
    queries = [load_block(q_ref, 0, there, piece) for piece in pieces]
    lse = plgpu.load(lse_ref.at[row], mask=there, other=0.0) * LOG2_E
    start, stop, high = tile_range(limits, grid)

    def body(tile, carry):
        at = tile * grid.tile
        inside = at + jnp.arange(grid.tile) < high
        logits = logits_of(queries, (load_block(k_ref, at, inside, piece) for piece in pieces), grid.tile)
        logits = logits * (scale * LOG2_E) - lse[:, None]
        visible = visible_slots(at, inside, begin, end, owner_ref, number)
        added = jnp.sum(jnp.where(visible, jnp.exp2(jnp.minimum(logits, 0.0)), 0.0), axis=0)
        mine, slots = inside, pl.ds(at, grid.tile)
        if owned:  # other heads' lie between them, whose programs add to these
            mine = inside & (plgpu.load(owner_ref.at[slots], mask=inside, other=-1).astype(jnp.int32) == number)
        old = plgpu.load(old_ref.at[slots], mask=mine, other=0.0)
        plgpu.store(out_ref.at[slots], old + added, mask=mine)
        return carry

    jax.lax.fori_loop(start, stop, body, 0)
