"""Decode attention over pre-RoPE coefficients for GPUs: a Pallas kernel in its Triton dialect.

Keys of a tile are rebuilt, K^ = C U^T, and rotated by their place within the tile; the *query* is turned back by the
position at which the tile begins, q . R(t0 + i) k = (R(-t0) q) . (R(i) k). A tile with a gap in its positions is
visited once for each run of consecutive ones. Where positions follow no order, keys are rotated each by its own.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.coefficient_attention.gpu_triton import bytes_of_token, check_stored, load_scale
from lowrank_kv_jax.pallas_kernels.gpu_grid import MOST_REBUILT, Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, launch
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import rotary_grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    add_tile,
    dot,
    load_block,
    load_ranges,
    split_range,
    start_carry,
    write_partial,
)
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

ANGLES = ("first_angles", "second_angles")  # what `rotation` gives
RESIDENT_BYTES = 32 * 1024  # a larger basis is read again for every tile, from the L2 cache


def rotary_coefficient_attention(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, value_basis, key_mean=None,
    origin=None, interpret=False,
) -> AttnPartial:
    """The op of `api.rotary_coefficient_attention`; `Unsupported` where the kernels do not cover a case."""
    if origin is not None:
        part = gpu_tiles.attend(
            q, tokens, key_basis, rope=rope, kv_heads=kv_heads, scale=scale, q_positions=q_positions, causal=causal,
            window=window, key_mean=key_mean, origin=origin, interpret=interpret,
        )
        return in_head_space(part, value_basis, kv_heads)
    keys, values = stored_arrays(tokens.keys), stored_arrays(tokens.values)
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
    part = attend_packed(rotary, keys, values, scale=scale, rotate=rope is not None, interpret=interpret)
    return in_head_space(by_query(part, q.shape[1]), value_basis, kv_heads)


class Plan(NamedTuple):
    """A launch of programs that rebuild keys.

    Attributes:
        grid: of it.
        way: in which they rotate, None where they do not.
        resident: whether they hold the basis.
        operands: by the name under which `attended` reads them.
    """

    grid: Grid
    way: Any
    resident: bool
    operands: dict[str, Operand]


def plan_of(rotary: Rotary, keys: Stored, values: Stored, rotate: bool, chunks: bool = False) -> Plan:
    """The launch for what is stored, maybe in `chunks`, whose keys need not be rebuilt where they are not rotated.

    Raises:
        Unsupported: the kernels do not read it.
    """
    packed = rotary.packed
    check_stored(packed, keys, values)
    (_, heads, rows, _), half = packed.q.shape, rotary.basis.shape[2] // 2
    token_bytes, rebuilt = bytes_of_token(keys) + bytes_of_token(values), 2 * half * packed.q.dtype.itemsize
    rebuilt = 0 if chunks and not rotate else rebuilt
    widened = 4 * token_bytes if keys.scales is not None else 0
    grid = decode_grid(rows, packed.rows * heads, keys.codes.shape[2], token_bytes, rebuilt, widened, chunks and rotate)
    by_slot = rotary.positions is not None
    grid = rotary_grid(grid, keys, values, packed.q.dtype.itemsize, 2 * half, by_slot)
    basis_bytes = 2 * half * rotary.basis.shape[-1] * packed.q.dtype.itemsize
    way, angles = rotation(rotary, rotate)
    read = {"q": packed.q, "basis": rotary.basis, "mean": rotary.mean, "keys": keys.codes, "key_scales": keys.scales,
            "values": values.codes, "value_scales": values.scales}
    there = {name: x for name, x in read.items() if x is not None}
    operands = dict(zip(ANGLES, angles, strict=False)) | dict(zip(there, by_head(packed, *there.values()), strict=True))
    return Plan(grid, way, basis_bytes <= RESIDENT_BYTES, operands)


def attend_packed(
    rotary: Rotary, keys: Stored, values: Stored, *, scale: float, rotate: bool, interpret: bool
) -> AttnPartial:
    """Partial `[B, K, M, Rv]`."""
    grid, way, resident, operands = plan_of(rotary, keys, values, rotate)
    kernel = functools.partial(
        _kernel, names=tuple(operands), grid=grid, scale=scale, way=way, resident=resident)
    # of codes in 8 bits, whose widening fills the registers, runs are read when they are visited
    told = gaps_of(rotary) if keys.scales is None else [visits(rotary, grid.tile)]
    return launch(
        "rotary_coefficient_attention", kernel, grid, rotary.packed, told, [*operands.values()], values.codes.shape[-1],
        interpret=interpret, reads_lse=True,
    )


def _kernel(limits, *refs, names: tuple[str, ...], grid: Grid, scale: float, way, resident: bool):
    *given, out_ref, lse_ref = refs
    of = dict(zip(names, given, strict=True))
    top, total, accs = attended(
        limits, of, visits_of(limits, grid.tile), grid=grid, scale=scale, way=way, resident=resident)
    write_partial(out_ref, lse_ref, grid, accs, columns(of["values"].shape[-1]), top, total)


def attended(limits, of: Mapping[str, Any], seen, *, grid: Grid, scale: float, way, resident: bool, reads: Any = True,
             folds: bool = False):
    """Running maximum, sum and outputs of this split's share of the visits.

    Args:
        of: references to the operands of a `Plan`.
        seen: visits, as `visits_of` gives them.
        reads: False where there are none, so that no basis need be read.
        folds: whether queries are folded into the basis, keys being as they were coded.
    """
    rotating = functools.partial(way, *(of[name] for name in ANGLES), grid.tile) if way else None
    q_ref, v_ref, vs_ref = of["q"], of["values"], of.get("value_scales")
    value_pieces = columns(v_ref.shape[-1])
    begin, end = load_ranges(limits, grid.rows, q_ref.shape[0])
    run_of, count = seen
    start, stop = split_range(count, grid)
    if folds:
        logits_of = folded(of["keys"], of.get("key_scales"), of["basis"], q_ref, grid=grid, reads=reads)
    else:
        logits_of = whole_keys(
            of["keys"], of.get("key_scales"), of["basis"], of.get("mean"), q_ref, rotating, grid=grid, resident=resident,
            reads=reads)

    def body(visit, carry):
        run = run_of(visit)
        at = run.tile * grid.tile
        slots = at + jnp.arange(grid.tile)
        mine = (slots >= run.low) & (slots < run.high)
        logits = logits_of(at, mine, run.offset)
        visible = mine[None] & (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
        value_scale = None if vs_ref is None else functools.partial(load_scale, vs_ref, at // TILE_OF_SCALES)
        values = (load_block(v_ref, at, mine, piece) for piece in value_pieces)
        return add_tile(carry, logits, scale, visible, q_ref.dtype, value_pieces, values, value_scale)

    return jax.lax.fori_loop(start, stop, body, start_carry(grid.rows, value_pieces))


def whole_keys(k_ref, ks_ref, basis_ref, mean_ref, q_ref, rotating, *, grid: Grid, resident: bool, reads: Any = True):
    """`logits(first slot, slots that count, offset of positions)` `[rows, tile]` of keys that are rebuilt at once."""
    dtype, key_pieces, half = q_ref.dtype, columns(k_ref.shape[-1]), basis_ref.shape[0] // 2
    there, all_half = jnp.arange(grid.rows) < q_ref.shape[0], jnp.full((half,), reads)
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
        keys, turned = rebuild([*coefficients(k_ref, ks_ref, at, mine, dtype)]), query
        if rotated is not None:
            keys, turned = rotated(keys, query, at, mine, offset)
        return sum(dot(x.astype(dtype), k.astype(dtype).T) for x, k in zip(turned, keys, strict=True))

    return logits


def folded(k_ref, ks_ref, basis_ref, q_ref, *, grid: Grid, reads: Any = True):
    """The same of keys that nothing turns: queries meet the basis, once."""
    dtype, size = q_ref.dtype, basis_ref.shape[0]
    there, channels = jnp.arange(grid.rows) < q_ref.shape[0], jnp.full((size,), reads)
    query = load_block(q_ref, 0, there, (0, size))
    queries = [dot(query, load_block(basis_ref, 0, channels, piece)).astype(dtype) for piece in columns(k_ref.shape[-1])]

    def logits(at, mine, offset):
        found = coefficients(k_ref, ks_ref, at, mine, dtype)
        return sum(dot(q, x.T) for q, x in zip(queries, found, strict=True))

    return logits


def coefficients(k_ref, ks_ref, at, mine, dtype):
    """Those of a tile, piece by piece of them."""
    for piece in columns(k_ref.shape[-1]):
        x = load_block(k_ref, at, mine, piece)
        if ks_ref is not None:
            x = x.astype(jnp.float32) * load_scale(ks_ref, at // TILE_OF_SCALES, piece)
        yield x.astype(dtype)
