"""Decode attention over pre-RoPE coefficients for GPUs: a Pallas kernel in its Triton dialect.

Keys of a tile are rebuilt, K^ = C U^T, and rotated by their place within the tile; the *query* is turned back by the
position at which the tile begins, q . R(t0 + i) k = (R(-t0) q) . (R(i) k). A tile with a gap in its positions is
visited once for each run of consecutive ones.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.coefficient_attention.gpu_triton import (
    add_values,
    bytes_of_token,
    check_stored,
    dot,
    given,
    head_spec,
    load_block,
    load_ranges,
    load_scale,
    online_softmax,
    row_limits,
    row_spec,
    split_range,
    start_carry,
    write_partial,
)
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import check_rotary_kernel
from lowrank_kv_jax.pallas_kernels.packing import (
    LOG2_E,
    TILE_OF_SCALES,
    Stored,
    columns,
    merge_splits,
    stored_arrays,
    unpack,
)
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import position_angle, turn
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import Rotary, prepare, read_run, visits
from lowrank_kv_jax.storage.basis import expand_values

RESIDENT_BYTES = 32 * 1024  # a larger basis is read again for every tile, from the L2 cache


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis, interpret=False
) -> AttnPartial:
    """The op of `api.rotary_coefficient_attention`; `Unsupported` where the kernel does not cover a case."""
    keys, values = stored_arrays(tokens.keys), stored_arrays(tokens.values)
    rotary = prepare(
        q, tokens, key_basis, rope=rope, kv_heads=kv_heads, q_positions=q_positions, causal=causal, window=window
    )
    part = attend_packed(rotary, keys, values, scale=scale, rotate=rope is not None, interpret=interpret)
    part = unpack(part, q.shape[1])
    return part if value_basis is None else AttnPartial(expand_values(value_basis, part.out, kv_heads), part.lse)


def attend_packed(
    rotary: Rotary, keys: Stored, values: Stored, *, scale: float, rotate: bool, interpret: bool
) -> AttnPartial:
    """Partial `[B, K, M, Rv]`, lse `EMPTY` where a row sees nothing."""
    packed = rotary.packed
    check_stored(packed, keys, values)
    (batch, heads, rows, _), half = packed.q.shape, rotary.basis.shape[2] // 2
    width = values.codes.shape[-1]
    token_bytes = bytes_of_token(keys) + bytes_of_token(values) + 2 * half * packed.q.dtype.itemsize
    grid = decode_grid(rows, batch * heads, keys.codes.shape[2], token_bytes)
    check_rotary_kernel(grid, keys, values, packed.q.dtype.itemsize, 2 * half)
    shape = (batch, heads, grid.splits, rows)
    basis_row = (lambda b: b) if rotary.basis.shape[0] == batch else (lambda b: 0)
    whole = pl.BlockSpec(rotary.cos.shape, lambda s, h, b: (0, 0, 0))
    runs = rotary.first.shape[1]
    limits = row_limits(visits(rotary, grid.tile), packed)
    stored = (*given(keys), *given(values))
    basis_bytes = 2 * half * keys.codes.shape[-1] * packed.q.dtype.itemsize
    kernel = functools.partial(
        _kernel, grid=grid, runs=runs, scale=scale, rotate=rotate, quantised=keys.scales is not None,
        resident=basis_bytes <= RESIDENT_BYTES,
    )
    out, lse = pl.pallas_call(
        kernel,
        grid=(grid.splits, heads, batch),
        in_specs=[
            row_spec(limits), whole, whole, head_spec(packed.q, batch, heads),
            pl.BlockSpec((None, None, *rotary.basis.shape[2:]), lambda s, h, b: (basis_row(b), h, 0, 0)),
            *(head_spec(x, batch, heads) for x in stored),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda s, h, b: (b, h, s, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda s, h, b: (b, h, s, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct((*shape, width), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name="rotary_coefficient_attention",
    )(limits, rotary.cos, rotary.sin, packed.q, rotary.basis, *stored)
    return merge_splits(out, lse)


def _kernel(
    limits_ref, cos_ref, sin_ref, q_ref, basis_ref, *refs, grid: Grid, runs: int, scale: float,
    rotate: bool, quantised: bool, resident: bool,
):
    if quantised:
        k_ref, ks_ref, v_ref, vs_ref, out_ref, lse_ref = refs
    else:
        (k_ref, v_ref, out_ref, lse_ref), ks_ref, vs_ref = refs, None, None
    dtype = q_ref.dtype
    key_pieces, value_pieces = columns(k_ref.shape[-1]), columns(v_ref.shape[-1])
    begin, end = load_ranges(limits_ref, grid.rows, q_ref.shape[0])
    half = basis_ref.shape[0] // 2
    there, all_half = jnp.arange(grid.rows) < q_ref.shape[0], jnp.full((half,), True)
    query = tuple(load_block(q_ref, 0, there, (side * half, half)).astype(jnp.float32) for side in range(2))

    def basis(side):
        return [load_block(basis_ref, side * half, all_half, piece) for piece in key_pieces]

    held = [basis(side) for side in range(2)] if resident else None
    start, stop = split_range(limits_ref[5 * runs], grid)
    local = [table[0, : grid.tile] for table in (cos_ref, sin_ref)]

    def rebuild(coefficients):
        """Both halves of the tile's keys, float32 `[tile, H]`."""
        halves = []
        for side in range(2):
            bases = held[side] if held else basis(side)
            halves.append(sum(dot(x, u.T) for x, u in zip(coefficients, bases, strict=True)))
        return halves

    def body(visit, carry):
        top, total, accs = carry
        run = read_run(lambda i: limits_ref[i], runs, visit)
        at = run.tile * grid.tile
        slots = at + jnp.arange(grid.tile)
        mine = (slots >= run.low) & (slots < run.high)
        scale_row = at // TILE_OF_SCALES

        def read(ref, piece):
            return load_block(ref, at, mine, piece)

        coefficients = []
        for piece in key_pieces:
            x = read(k_ref, piece)
            if ks_ref is not None:
                x = x.astype(jnp.float32) * load_scale(ks_ref, scale_row, piece)
            coefficients.append(x.astype(dtype))
        keys, turned = rebuild(coefficients), query
        if rotate:
            cos, sin = position_angle(cos_ref, sin_ref, at + run.offset)
            keys, turned = turn(*keys, *local), turn(*query, cos, -sin)
        logits = sum(dot(x.astype(dtype), k.astype(dtype).T) for x, k in zip(turned, keys, strict=True))
        visible = mine[None] & (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
        weights, shrink, top, total = online_softmax(logits * (scale * LOG2_E), visible, top, total)
        value_scale = None if vs_ref is None else functools.partial(load_scale, vs_ref, scale_row)
        values = functools.partial(read, v_ref)
        return top, total, add_values(weights.astype(dtype), shrink, accs, value_pieces, values, value_scale)

    top, total, accs = jax.lax.fori_loop(start, stop, body, start_carry(grid.rows, value_pieces))
    write_partial(out_ref, lse_ref, grid.rows, accs, value_pieces, top, total)
