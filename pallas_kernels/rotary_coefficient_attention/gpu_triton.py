"""Decode attention over pre-RoPE coefficients for GPUs: a Pallas kernel in its Triton dialect.

Keys of a tile are rebuilt, K^ = C U^T, and rotated by their place within the tile; the *query* is turned back by the
position at which the tile begins, q . R(t0 + i) k = (R(-t0) q) . (R(i) k). A tile with a gap in its positions is
visited once for each run of consecutive ones. Where positions follow no order, keys are rotated each by its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.coefficient_attention.gpu_triton import bytes_of_token, check_stored, load_scale
from lowrank_kv_jax.pallas_kernels.gpu_grid import MOST_REBUILT, Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, head_spec, launch
from lowrank_kv_jax.pallas_kernels.gpu_pages import chosen_arrays, of_pages, readers
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import rotary_grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    add_tile,
    dot,
    load_block,
    load_ranges,
    split_range,
    start_beside,
    write_partial,
)
from lowrank_kv_jax.pallas_kernels.owned_slots import Rows, rows_of
from lowrank_kv_jax.pallas_kernels.packing import (
    TILE_OF_SCALES,
    Stored,
    by_query,
    columns,
    stored_arrays,
)
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import gpu_rebuilt, gpu_tiles
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rotation import gaps_of, rotation, visits_of
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import (
    Rotary,
    in_head_space,
    prepare,
    visits,
)
from lowrank_kv_jax.storage.basis import as_array

WIDEST_BESIDE = 256  # bytes of a head: of a wider one the basis leaves too little shared memory for other tokens
RESIDENT_BYTES = 32 * 1024  # a larger basis is read again for every tile, from the L2 cache


def reads_beside(q, tokens, key_basis, others) -> bool:
    """Whether programs over `tokens`, of values in head space, read each of the `others`, too."""
    plain = all(isinstance(x, jax.Array) and x.shape[-1] == q.shape[-1] for own in others for x in own.tokens[:2])
    coded = any(hasattr(x, name) for x in tokens[:2] for name in ("runs", "tile"))
    small = q.shape[-1] * q.dtype.itemsize <= WIDEST_BESIDE and key_basis.shape[-1] <= MOST_REBUILT
    return plain and small and not coded and tokens.values.shape[-1] == q.shape[-1]


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis, key_mean=None,
    origin=None, beside=(), interpret=False,
) -> AttnPartial:
    """The op of `api.rotary_coefficient_attention`; `Unsupported` where the kernels do not cover a case.

    Args:
        beside: other tokens, where it `reads_beside` them.
    """
    if origin is not None:
        part = gpu_tiles.attend(
            q, tokens, as_array(key_basis), rope=rope, kv_heads=kv_heads, scale=scale, q_positions=q_positions,
            causal=causal, window=window, key_mean=key_mean, origin=origin, interpret=interpret,
        )
        return in_head_space(part, value_basis, kv_heads)
    keys, values = (stored_arrays(x, pages=True) for x in (tokens.keys, tokens.values))
    if keys.runs is not None or key_basis.shape[-1] > MOST_REBUILT:
        part = gpu_rebuilt.attend(
            q, tokens, key_basis, rope=rope, kv_heads=kv_heads, scale=scale, q_positions=q_positions, causal=causal,
            window=window, key_mean=key_mean, interpret=interpret,
        )
        return in_head_space(part, value_basis, kv_heads)
    rotary = prepare(
        q, tokens, key_basis, rope=rope, kv_heads=kv_heads, q_positions=q_positions, causal=causal, window=window,
        key_mean=key_mean,
    )
    others = [rows_of(x.q, x.tokens, x.q_positions, x.causal, x.window) for x in beside]
    part = attend_packed(
        rotary, keys, values, scale=scale, rotate=rope is not None, interpret=interpret, beside=others)
    return in_head_space(by_query(part, q.shape[1]), value_basis, kv_heads)


def attend_packed(
    rotary: Rotary, keys: Stored, values: Stored, *, scale: float, rotate: bool, interpret: bool,
    beside: Sequence[Rows] = (),
) -> AttnPartial:
    """Partial `[B, K, M, Rv]`, with what is `beside` in it."""
    packed = rotary.packed
    check_stored(packed, keys, values)
    (batch, heads, rows, _), half = packed.q.shape, rotary.basis.shape[2] // 2
    token_bytes, rebuilt = bytes_of_token(keys) + bytes_of_token(values), 2 * half * packed.q.dtype.itemsize
    widened = 4 * token_bytes if keys.scales is not None else 0
    grid = decode_grid(rows, batch * heads, keys.slots, token_bytes, rebuilt, widened)
    grid = of_pages(grid) if keys.chosen is not None or values.chosen is not None else grid
    by_slot = rotary.positions is not None
    grid = rotary_grid(grid, keys, values, packed.q.dtype.itemsize, 2 * half, by_slot)
    basis_bytes = 2 * half * rotary.basis.shape[-1] * packed.q.dtype.itemsize
    (way, angles), chosen = rotation(rotary, rotate, keys), chosen_arrays(keys, values)
    kernel = functools.partial(
        _kernel, grid=grid, scale=scale, way=way, angles=len(angles), quantised=keys.scales is not None,
        centred=rotary.mean is not None, resident=basis_bytes <= RESIDENT_BYTES,
        pages=[None if x.chosen is None else x.page for x in (keys, values)], chosen=len(chosen),
    )
    # of codes in 8 bits, whose widening fills the registers, runs are read when they are visited
    told = gaps_of(rotary) if keys.scales is None else [visits(rotary, grid.tile)]
    of_bases = [(rotary.basis, head_spec(rotary.basis, batch, heads, rotary.first)), *by_head(packed, rotary.mean)]
    return launch(
        "rotary_coefficient_attention", kernel, grid, packed, told,
        [*by_head(packed, *chosen), *angles, *by_head(packed, packed.q), *of_bases,
         *by_head(packed, keys.codes, keys.scales, values.codes, values.scales)],
        values.codes.shape[-1], interpret=interpret, beside=beside, reads_lse=not beside,
    )


def _kernel(
    limits, *refs, grid: Grid, scale: float, way, angles: int, quantised: bool, centred: bool, resident: bool,
    pages: list[int | None], chosen: int,
):
    chosen_refs, refs = refs[:chosen], refs[chosen:]
    angle_refs, (q_ref, basis_ref, *refs) = refs[:angles], refs[angles:]
    rotating = functools.partial(way, *angle_refs, grid.tile, *chosen_refs[:1]) if way else None
    mean_ref, refs = (refs[0], refs[1:]) if centred else (None, refs)
    read_key, read_value = readers(pages, chosen_refs)
    if quantised:
        k_ref, ks_ref, v_ref, vs_ref, out_ref, lse_ref = refs
    else:
        (k_ref, v_ref, out_ref, lse_ref), ks_ref, vs_ref = refs, None, None
    dtype, there = q_ref.dtype, lse_ref.shape[0]
    value_pieces = columns(v_ref.shape[-1])
    begin, end = load_ranges(limits, grid.rows, there)
    run_of, count = visits_of(limits, grid.tile)
    start, stop = split_range(count, grid)
    channels = [first + jnp.arange(size) for first, size in value_pieces]
    beside = start_beside(limits.beside, grid, scale, channels, there)
    logits_of = whole_keys(
        k_ref, ks_ref, basis_ref, mean_ref, q_ref, rotating, grid=grid, resident=resident, read=read_key)

    def body(visit, carry):
        run = run_of(visit)
        at = run.tile * grid.tile
        slots = at + jnp.arange(grid.tile)
        mine = (slots >= run.low) & (slots < run.high)
        logits = logits_of(at, mine, run.offset)
        visible = mine[None] & (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
        value_scale = None if vs_ref is None else functools.partial(load_scale, vs_ref, at // TILE_OF_SCALES)
        values = (read_value(v_ref, at, mine, piece) for piece in value_pieces)
        return add_tile(carry, logits, scale, visible, dtype, value_pieces, values, value_scale)

    top, total, accs = jax.lax.fori_loop(start, stop, body, beside)
    write_partial(out_ref, lse_ref, grid, accs, value_pieces, top, total)


def whole_keys(
    k_ref, ks_ref, basis_ref, mean_ref, q_ref, rotating, *, grid: Grid, resident: bool, read: Callable[..., Any]
):
    """`logits(first slot, slots that count, offset of positions)` `[rows, tile]` of keys that are rebuilt at once."""
    dtype, key_pieces, half = q_ref.dtype, columns(k_ref.shape[-1]), basis_ref.shape[0] // 2
    there, all_half = jnp.arange(grid.rows) < q_ref.shape[0], jnp.full((half,), True)
    query = tuple(load_block(q_ref, 0, there, (side * half, half)).astype(jnp.float32) for side in range(2))

    def basis(side):
        return [load_block(basis_ref, side * half, all_half, piece) for piece in key_pieces]

    held = [basis(side) for side in range(2)] if resident else None
    rotated = rotating() if rotating else None
    means = None if mean_ref is None else [mean_ref[pl.ds(side * half, half)][None] for side in range(2)]

    def rebuild(coefficients):
        """Both halves of the tile's keys, float32 `[tile, H]`."""
        halves = []
        for side in range(2):
            bases = held[side] if held else basis(side)
            halves.append(sum(dot(x, u.T) for x, u in zip(coefficients, bases, strict=True)))
        return halves if means is None else [x + mean for x, mean in zip(halves, means, strict=True)]

    def logits(at, mine, offset):
        coefficients = []
        for piece in key_pieces:
            x = read(k_ref, at, mine, piece)
            if ks_ref is not None:
                x = x.astype(jnp.float32) * load_scale(ks_ref, at // TILE_OF_SCALES, piece)
            coefficients.append(x.astype(dtype))
        keys, turned = rebuild(coefficients), query
        if rotated is not None:
            keys, turned = rotated(keys, query, at, mine, offset)
        return sum(dot(x.astype(dtype), k.astype(dtype).T) for x, k in zip(turned, keys, strict=True))

    return logits
