"""Decode attention over tokens in 2, 4 or 8 bits for GPUs: a Pallas kernel in its Triton dialect.

As the kernel of `gpu_triton`, whose programs and splits it has; codes are widened in registers with the scales of their
tiles. Tiles of heads behind each other begin with each head, and so do the steps of a program.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, tiled_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, launch
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    add_tile,
    load_columns,
    load_ranges,
    logits_of,
    span,
    split_range,
    start_beside,
    visible_slots,
    write_partial,
)
from lowrank_kv_jax.pallas_kernels.gpu_tiled import Form, Tiled, numbers, tile_for, tiled
from lowrank_kv_jax.pallas_kernels.owned_slots import Rows
from lowrank_kv_jax.pallas_kernels.owned_slots import numbers as numbers_of_heads
from lowrank_kv_jax.pallas_kernels.packing import by_query, pack, power_of_two

HEAD = 4  # of a row: the head that is read, its first slot, its first tiles of keys and of values; otherwise zeros


def attend_slots(
    q, tokens, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None,
    beside: Rows | None = None,
) -> AttnPartial:
    """As `gpu_triton.attend_slots`."""
    keys, values = (tiled(getattr(tokens, name), name) for name in ("keys", "values"))
    packed = pack(q, max(keys.codes.shape[1], values.codes.shape[1]), begin, end)
    batch, heads, rows, _ = packed.q.shape
    tile = tile_for(power_of_two(rows, 16), keys.form, values.form)
    grid = tiled_grid(rows, batch * heads, size, tile, sum(x.codes.shape[-1] for x in (keys, values)))
    kernel = functools.partial(
        _kernel, grid=grid, scale=scale, keys=keys.form, values=values.form, owned=owner is not None,
        key_refs=len(keys.arrays()),
    )
    part = launch(
        "coefficient_attention", kernel, grid, packed, _told(batch, keys, values, owner),
        by_head(packed, owner, packed.q, *keys.arrays(), *values.arrays()),
        sum(size for _, size in values.form.pieces()), interpret=interpret,
        beside=() if beside is None else (beside,),
    )
    return by_query(AttnPartial(values.form.collected(part.out), part.lse), q.shape[1])


def _told(rows: int, keys: Tiled, values: Tiled, owner: jax.Array | None) -> list[jax.Array]:
    """int32 `[B, HEAD]`, or nothing: zeros."""
    if owner is None and keys.starts is None and values.starts is None:
        return []
    number = jnp.zeros((rows, 1), jnp.int32) if owner is None else numbers_of_heads(rows, owner)
    (start, key_tile), (other, value_tile) = (x.first_tiles(rows) for x in (keys, values))
    return [jnp.concatenate([number, start if values.starts is None else other, key_tile, value_tile], axis=1)]


def _kernel(
    limits, *refs, grid: Grid, scale: float, keys: Form, values: Form, owned: bool, key_refs: int
):
    (owner_ref, *refs) = refs if owned else (None, *refs)
    q_ref, *stored, out_ref, lse_ref = refs
    k_refs, v_refs = stored[:key_refs], stored[key_refs:]
    begin, end = load_ranges(limits, grid.rows, lse_ref.shape[0])
    there = jnp.arange(grid.rows) < lse_ref.shape[0]
    queries = [load_columns(q_ref, 0, there, channels) for channels in keys.channels_of_pieces()]
    low, high = span(limits)
    number, origin, *tiles = (limits.told[0][i] if limits.told else 0 for i in range(HEAD))
    first = (low - origin) // grid.tile
    # the span of a head without tokens is (0, 0): counted from where it would begin, a tile before the buffer
    start, stop = split_range(jnp.where(high > low, pl.cdiv(high - origin, grid.tile) - first, 0), grid)

    def body(step, carry):
        place = (first + step) * grid.tile
        at = origin + place
        inside = at + jnp.arange(grid.tile) < high

        def read(refs, form: Form, tile):
            return numbers(refs, form, at, tile + place // form.tokens, inside)

        logits = logits_of(queries, read(k_refs, keys, tiles[0]), grid.tile)
        visible = visible_slots(at, inside, begin, end, owner_ref, number)
        return add_tile(carry, logits, scale, visible, q_ref.dtype, values.pieces(), read(v_refs, values, tiles[1]))

    carry = start_beside(limits.beside, grid, scale, values.channels_of_pieces(), lse_ref.shape[0])
    top, total, accs = jax.lax.fori_loop(start, stop, body, carry)
    write_partial(out_ref, lse_ref, grid, accs, values.pieces(), top, total)
