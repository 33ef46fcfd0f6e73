"""Decode attention over coefficients for GPUs: a Pallas kernel in its Triton dialect.

A program serves the query rows of one kv head (its G query heads side by side, padded to a tensor core's 16) over one
split of the tokens, and writes a float32 partial; the few partials of the splits are merged by XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.coefficient_attention import gpu_codes, gpu_tiles
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, launch
from lowrank_kv_jax.pallas_kernels.gpu_pages import chosen_arrays, of_pages, readers
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import coefficient_grid, given_grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    add_tile,
    load_block,
    load_ranges,
    logits_of,
    start_beside,
    start_carry,
    tile_range,
    visible_slots,
    write_partial,
)
from lowrank_kv_jax.pallas_kernels.owned_slots import Rows, numbers
from lowrank_kv_jax.pallas_kernels.packing import (
    TILE_OF_SCALES,
    Packed,
    Stored,
    by_query,
    columns,
    in_tiles,
    pack,
    stored_arrays,
)
from lowrank_kv_jax.storage.eight_bits import EightBits

DTYPES = ("float32", "bfloat16", "float16", "int8")
FEW_ROWS = 16  # of programs that are given their logits: sums of more than a tensor core's spill registers


def reads_beside(tokens, others) -> bool:
    """Whether `attend_slots` over `tokens` reads `others`, too: as they are, in bands of as many channels."""
    coded = any(isinstance(x, EightBits) or hasattr(x, "tile") or hasattr(x, "runs") for x in others[:2])
    return not (coded or hasattr(tokens.values, "runs")) and tokens.values.shape[-1] == others.values.shape[-1]


def attend_slots(
    q, tokens, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None,
    beside: Rows | None = None,
) -> AttnPartial:
    """Queries `[B, T, N, Rk]` over the slots `begin <= slot < end` `[B, T]` of tokens that B / B' rows in order share.

    Args:
        size: about how many tokens a row sees at most; decides into how many splits they are cut.
        owner: see `owned_slots.Rows`.
        beside: other tokens that the same programs attend to; see `reads_beside`.
    """
    common = dict(scale=scale, size=size, interpret=interpret, owner=owner)
    if in_tiles(tokens.keys) or in_tiles(tokens.values):
        return gpu_tiles.attend_slots(q, tokens, begin, end, **common, beside=beside)
    keys, values = (stored_arrays(x, magnitudes=True, pages=True) for x in (tokens.keys, tokens.values))
    if keys.runs is not None or values.runs is not None:
        return gpu_codes.attend_slots(q, keys, values, begin, end, **common)
    packed = pack(q, max(keys.heads, values.heads), begin, end)
    return by_query(attend_packed(packed, keys, values, **common, beside=beside), q.shape[1])


def attend_packed(
    packed: Packed, keys: Stored, values: Stored, *, scale: float, size: int, interpret: bool,
    owner: jax.Array | None = None, beside: Rows | None = None,
) -> AttnPartial:
    """Partial `[B, H, M, Rv]`, with what is `beside` in it."""
    check_stored(packed, keys, values)
    batch, heads, rows, _ = packed.q.shape
    grid = decode_grid(rows, batch * heads, size, bytes_of_token(keys) + bytes_of_token(values))
    grid = of_pages(grid) if keys.chosen is not None or values.chosen is not None else grid
    grid = coefficient_grid(grid, keys, values, packed.q.dtype.itemsize)
    chosen = chosen_arrays(keys, values)
    kernel = functools.partial(
        _kernel, grid=grid, scale=scale, quantised=keys.scales is not None, owned=owner is not None,
        layers=[None if x.norms is None else x.layer for x in (keys, values)],
        pages=[None if x.chosen is None else x.page for x in (keys, values)], chosen=len(chosen),
    )
    told = [] if owner is None else [numbers(batch, owner)]
    operands = by_head(
        packed, owner, keys.norms, values.norms, *chosen, packed.q, keys.codes, keys.scales, values.codes, values.scales)
    return launch(
        "coefficient_attention", kernel, grid, packed, told, operands, values.codes.shape[-1], interpret=interpret,
        beside=() if beside is None else (beside,),
    )


def attend_given(
    logits: jax.Array, values: Stored, begin, end, *, dtype: Any, scale: float, interpret: bool
) -> AttnPartial:
    """The same of queries `[B, T, N, .]` whose logits are given.

    Args:
        logits: float32 `[B, T, N, P, S']`, not scaled yet, P numbers that add up to each, of S' slots: as many as a
            program of packed tokens reads at once, or more. Those of slots that a query does not see may be anything.
        values: in 16 bits.
        dtype: of weights.
    """
    batch, queries, q_heads, parts, _ = logits.shape
    stored = values.codes.shape[1]
    able = (heads for heads in range(stored, q_heads + 1, stored) if q_heads % heads == 0)
    few = next((heads for heads in able if queries * q_heads // heads <= FEW_ROWS), q_heads)
    packed = pack(logits.reshape(*logits.shape[:3], -1), few, begin, end)
    heads, rows, size, width = *packed.q.shape[1:3], *values.codes.shape[2:]
    grid = decode_grid(rows, batch * heads, size, bytes_of_token(values))
    grid = given_grid(grid, values, parts)
    kernel = functools.partial(_given_kernel, grid=grid, scale=scale, parts=parts, dtype=dtype)
    operands = by_head(packed, packed.q, values.codes)
    part = launch(
        "coefficient_attention", kernel, grid, packed, [], operands, width, interpret=interpret, reads_lse=True)
    return by_query(part, queries)


def check_stored(packed: Packed, keys: Stored, values: Stored) -> None:
    """Raise `Unsupported` for storage that the GPU kernels do not read."""
    for name, x in (("keys", keys), ("values", values)):
        if x.runs is not None:
            raise Unsupported(f"{name} packed in several widths")
        if x.codes.dtype.name not in DTYPES:
            raise Unsupported(f"{name} of dtype {x.codes.dtype.name}, allowed are {', '.join(DTYPES)}")
        if (x.codes.dtype == jnp.int8) != (x.scales is not None):
            raise Unsupported(f"{name}: int8 codes come with scales, and nothing else does")
    if (keys.scales is None) != (values.scales is None):
        raise Unsupported("keys and values in 8 bits, or both not")
    if packed.q.dtype.name not in DTYPES[:3]:
        raise Unsupported(f"queries of dtype {packed.q.dtype.name}")


def bytes_of_token(stored: Stored) -> int:
    """Bytes of one token of one head."""
    return stored.codes.shape[-1] * stored.codes.dtype.itemsize


def load_scale(ref, row, piece: tuple[int, int]):
    """Some columns of a row of scales, float32 `[1, w]`, zeros beyond R."""
    return load_block(ref, row, jnp.full((1,), True), piece).astype(jnp.float32)


def _load_norms(ref, layer: int, at, inside):
    """Of a tile from slot `at` on, float32 `[tile]`, of `ref` `[S, L]`."""
    slots = at + jnp.arange(inside.shape[0])
    return plgpu.load(ref.at[slots, jnp.full_like(slots, layer)], mask=inside, other=0).astype(jnp.float32)


def _kernel(
    limits, *refs, grid: Grid, scale: float, quantised: bool, owned: bool, layers: list[int | None],
    pages: list[int | None], chosen: int,
):
    (owner_ref, *refs) = refs if owned else (None, *refs)
    refs = list(refs)
    norms = [None if layer is None else functools.partial(_load_norms, refs.pop(0), layer) for layer in layers]
    (read_key, read_value), (q_ref, *refs) = readers(pages, refs[:chosen]), refs[chosen:]
    if quantised:
        k_ref, ks_ref, v_ref, vs_ref, out_ref, lse_ref = refs
    else:
        (k_ref, v_ref, out_ref, lse_ref), ks_ref, vs_ref = refs, None, None
    key_pieces, value_pieces = columns(k_ref.shape[-1]), columns(v_ref.shape[-1])
    begin, end = load_ranges(limits, grid.rows, lse_ref.shape[0])
    there = jnp.arange(grid.rows) < lse_ref.shape[0]
    queries = [load_block(q_ref, 0, there, piece) for piece in key_pieces]
    start, stop, high = tile_range(limits, grid)

    def body(tile, carry):
        at = tile * grid.tile
        inside = at + jnp.arange(grid.tile) < high
        scale_row = at // TILE_OF_SCALES

        def scaled(q, piece):
            return q if ks_ref is None else (q.astype(jnp.float32) * load_scale(ks_ref, scale_row, piece)).astype(q.dtype)

        asked = [scaled(q, piece) for q, piece in zip(queries, key_pieces, strict=True)]
        keys = (read_key(k_ref, at, inside, piece) for piece in key_pieces)
        logits = logits_of(asked, keys, grid.tile)
        key_norms, value_norms = (load and load(at, inside) for load in norms)
        logits = logits if key_norms is None else logits * key_norms[None]
        visible = visible_slots(at, inside, begin, end, owner_ref, limits.told[0][0] if owned else None)
        value_scale = None if vs_ref is None else functools.partial(load_scale, vs_ref, scale_row)
        values = (read_value(v_ref, at, inside, piece) for piece in value_pieces)
        return add_tile(
            carry, logits, scale, visible, q_ref.dtype, value_pieces, values, value_scale, value_norms)

    channels = [first + jnp.arange(size) for first, size in value_pieces]
    carry = start_beside(limits.beside, grid, scale, channels, lse_ref.shape[0])
    top, total, accs = jax.lax.fori_loop(start, stop, body, carry)
    write_partial(out_ref, lse_ref, grid, accs, value_pieces, top, total)


def _given_kernel(limits, logits_ref, v_ref, out_ref, lse_ref, *, grid: Grid, scale: float, parts: int, dtype: Any):
    pieces, each, rows = columns(v_ref.shape[-1]), logits_ref.shape[1] // parts, jnp.arange(grid.rows)
    begin, end = load_ranges(limits, grid.rows, lse_ref.shape[0])
    start, stop, high = tile_range(limits, grid)

    def body(tile, carry):
        at = tile * grid.tile
        slots = at + jnp.arange(grid.tile)
        inside = slots < high
        there = (rows < lse_ref.shape[0])[:, None] & inside[None]

        def read(part):
            where = jnp.broadcast_to(rows[:, None], there.shape), jnp.broadcast_to(slots[None] + part * each, there.shape)
            return plgpu.load(logits_ref.at[where], mask=there, other=0)

        visible = visible_slots(at, inside, begin, end, None, None)
        values = (load_block(v_ref, at, inside, piece) for piece in pieces)
        return add_tile(carry, sum(map(read, range(parts))), scale, visible, dtype, pieces, values)

    top, total, accs = jax.lax.fori_loop(start, stop, body, start_carry(grid.rows, pieces))
    write_partial(out_ref, lse_ref, grid, accs, pieces, top, total)
