"""Decode attention over pre-RoPE coefficients for GPUs: a Pallas kernel in its Triton dialect.

Keys of a tile are rebuilt, K^ = C U^T, and rotated by their place within the tile; the *query* is turned back by the
position at which the tile begins, q . R(t0 + i) k = (R(-t0) q) . (R(i) k). A tile with a gap in its positions is
visited once for each run of consecutive ones. Where positions follow no order, keys are rotated each by its own.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.coefficient_attention.gpu_triton import bytes_of_token, check_stored, load_scale
from lowrank_kv_jax.pallas_kernels.gpu_grid import MOST_REBUILT, Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, head_spec, launch
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

ANGLES, CHOSEN = "angles", "chosen"  # how the names of operands begin that `rotation` and `chosen_arrays` give
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


class Plan(NamedTuple):
    """A launch of programs that rebuild keys.

    Attributes:
        grid: of it.
        way: in which they rotate, None where they do not.
        resident: whether they hold the basis.
        pages: tokens of a page of keys and of values, None where all are read.
        operands: by the name under which `attended` reads them.
    """

    grid: Grid
    way: Any
    resident: bool
    pages: tuple[int | None, int | None]
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
    grid = decode_grid(rows, packed.rows * heads, keys.slots, token_bytes, rebuilt, widened, chunks and rotate)
    grid = of_pages(grid) if keys.chosen is not None or values.chosen is not None else grid
    by_slot = rotary.positions is not None
    grid = rotary_grid(grid, keys, values, packed.q.dtype.itemsize, 2 * half, by_slot)
    basis_bytes = 2 * half * rotary.basis.shape[-1] * packed.q.dtype.itemsize
    (way, angles), chosen = rotation(rotary, rotate, keys), by_head(packed, *chosen_arrays(keys, values))
    named = ((CHOSEN, chosen), (ANGLES, angles))
    operands = {f"{name}{number}": x for name, own in named for number, x in enumerate(own)}
    operands["basis"] = rotary.basis, head_spec(rotary.basis, packed.rows, heads, rotary.first)
    read = {"q": packed.q, "mean": rotary.mean, "keys": keys.codes, "key_scales": keys.scales, "values": values.codes,
            "value_scales": values.scales}
    there = {name: x for name, x in read.items() if x is not None}
    operands |= dict(zip(there, by_head(packed, *there.values()), strict=True))
    key_page, value_page = (None if x.chosen is None else x.page for x in (keys, values))
    return Plan(grid, way, basis_bytes <= RESIDENT_BYTES, (key_page, value_page), operands)


def attend_packed(
    rotary: Rotary, keys: Stored, values: Stored, *, scale: float, rotate: bool, interpret: bool,
    beside: Sequence[Rows] = (),
) -> AttnPartial:
    """Partial `[B, K, M, Rv]`, with what is `beside` in it."""
    plan = plan_of(rotary, keys, values, rotate)
    kernel = functools.partial(_kernel, plan=plan._replace(operands={}), names=tuple(plan.operands), scale=scale)
    # of codes in 8 bits, whose widening fills the registers, runs are read when they are visited
    told = gaps_of(rotary) if keys.scales is None else [visits(rotary, plan.grid.tile)]
    return launch(
        "rotary_coefficient_attention", kernel, plan.grid, rotary.packed, told, [*plan.operands.values()],
        values.codes.shape[-1], interpret=interpret, beside=beside, reads_lse=not beside,
    )


def _kernel(limits, *refs, plan: Plan, names: tuple[str, ...], scale: float):
    *given, out_ref, lse_ref = refs
    of = dict(zip(names, given, strict=True))
    top, total, accs = attended(limits, of, visits_of(limits, plan.grid.tile), plan, scale=scale)
    write_partial(out_ref, lse_ref, plan.grid, accs, columns(of["values"].shape[-1]), top, total)


def attended(
    limits, of: Mapping[str, Any], seen, plan: Plan, *, scale: float, reads: Any = True, folds: bool = False
):
    """Running maximum, sum and outputs of this split's share of the visits, and of what is beside.

    Args:
        of: references to the operands of a `Plan`.
        seen: visits, as `visits_of` gives them.
        plan: whose own operands are not read.
        reads: False where there are none, so that no basis need be read.
        folds: whether queries are folded into the basis, keys being as they were coded.
    """
    grid, q_ref, v_ref, vs_ref = plan.grid, of["q"], of["values"], of.get("value_scales")
    chosen, angles = ([ref for name, ref in of.items() if name.startswith(kind)] for kind in (CHOSEN, ANGLES))
    rotating = functools.partial(plan.way, *angles, grid.tile, *chosen[:1]) if plan.way else None
    read_key, read_value = readers(plan.pages, chosen)
    value_pieces, (run_of, count) = columns(v_ref.shape[-1]), seen
    begin, end = load_ranges(limits, grid.rows, q_ref.shape[0])
    start, stop = split_range(count, grid)
    channels = [first + jnp.arange(size) for first, size in value_pieces]
    carry = start_beside(limits.beside, grid, scale, channels, q_ref.shape[0])
    read = functools.partial(coefficients, of["keys"], of.get("key_scales"), dtype=q_ref.dtype, read=read_key)
    if folds:
        logits_of = folded(read, of["basis"], q_ref, grid=grid, reads=reads)
    else:
        logits_of = whole_keys(
            read, of["basis"], of.get("mean"), q_ref, rotating, grid=grid, resident=plan.resident, reads=reads)

    def body(visit, carry):
        run = run_of(visit)
        at = run.tile * grid.tile
        slots = at + jnp.arange(grid.tile)
        mine = (slots >= run.low) & (slots < run.high)
        logits = logits_of(at, mine, run.offset)
        visible = mine[None] & (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
        value_scale = None if vs_ref is None else functools.partial(load_scale, vs_ref, at // TILE_OF_SCALES)
        values = (read_value(v_ref, at, mine, piece) for piece in value_pieces)
        return add_tile(carry, logits, scale, visible, q_ref.dtype, value_pieces, values, value_scale)

    return jax.lax.fori_loop(start, stop, body, carry)


def whole_keys(
    read: Callable[..., Any], basis_ref, mean_ref, q_ref, rotating, *, grid: Grid, resident: bool, reads: Any = True
):
    """`logits(first slot, slots that count, offset of positions)` `[rows, tile]` of keys that are rebuilt at once.

    Args:
        read: `coefficients` of a tile.
    """
    dtype, key_pieces, half = q_ref.dtype, columns(basis_ref.shape[-1]), basis_ref.shape[0] // 2
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
        keys, turned = rebuild([*read(at, mine)]), query
        if rotated is not None:
            keys, turned = rotated(keys, query, at, mine, offset)
        return sum(dot(x.astype(dtype), k.astype(dtype).T) for x, k in zip(turned, keys, strict=True))

    return logits


def folded(read: Callable[..., Any], basis_ref, q_ref, *, grid: Grid, reads: Any = True):
    """The same of keys that nothing turns: queries meet the basis, once."""
    dtype, size = q_ref.dtype, basis_ref.shape[0]
    there, channels = jnp.arange(grid.rows) < q_ref.shape[0], jnp.full((size,), reads)
    query, pieces = load_block(q_ref, 0, there, (0, size)), columns(basis_ref.shape[-1])
    queries = [dot(query, load_block(basis_ref, 0, channels, piece)).astype(dtype) for piece in pieces]

    def logits(at, mine, offset):
        return sum(dot(q, x.T) for q, x in zip(queries, read(at, mine), strict=True))

    return logits


def coefficients(k_ref, ks_ref, at, mine, *, dtype, read: Callable[..., Any]):
    """Those of a tile, piece by piece of them."""
    for piece in columns(k_ref.shape[-1]):
        x = read(k_ref, at, mine, piece)
        if ks_ref is not None:
            x = x.astype(jnp.float32) * load_scale(ks_ref, at // TILE_OF_SCALES, piece)
        yield x.astype(dtype)
