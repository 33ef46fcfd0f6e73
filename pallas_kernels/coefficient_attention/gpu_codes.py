"""Decode attention over packed codes of several widths for GPUs: a Pallas kernel in its Triton dialect.

As the kernel of `gpu_triton`, whose programs and splits it has, but turned around: tokens are the rows of the first
product and bytes those of the second, so that bytes are the operand that is held in registers, and as few as eight query
rows are a whole one. A program is one warp where its sums fit: nothing waits for another, and no byte is unpacked twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, packed_grid, packed_heads
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, launch
from lowrank_kv_jax.pallas_kernels.gpu_packed import (
    WINDOW,
    columns_of,
    load_window,
    numbers_of,
    read_of,
    spread_queries,
    windows_of,
    with_rows,
)
from lowrank_kv_jax.pallas_kernels.gpu_softmax import (
    load_ranges,
    online_softmax,
    start_carry,
    tile_range,
    visible_slots,
)
from lowrank_kv_jax.pallas_kernels.owned_slots import numbers
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, LOG2_E, Stored, pack, unpack
from lowrank_kv_jax.storage.water_filled import WORD, components_of


def attend_slots(
    q, keys: Stored, values: Stored, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None
) -> AttnPartial:
    """As `gpu_triton.attend_slots`."""
    _check(q, keys, values)
    stored = max(keys.codes.shape[1], values.codes.shape[1])

    def columns(warps: int) -> int:
        return columns_of(values.runs, warps * WINDOW)

    def token_bytes(warps: int) -> int:
        return read_of(keys.runs, WINDOW) + read_of(values.runs, warps * WINDOW)

    packed = pack(q, packed_heads(stored, q.shape[2], q.shape[1], columns), begin, end)
    batch, heads, rows, _ = packed.q.shape
    grid = packed_grid(rows, batch * heads, size, columns, token_bytes)
    query, factors = spread_queries(packed.q, keys.runs)
    factors = scale * jnp.pad(factors, [(0, 0)] * 3 + [(0, grid.rows - rows)])
    head = packed.span if owner is None else jnp.concatenate([packed.span, numbers(batch, owner)], axis=1)
    kernel = functools.partial(
        _kernel, grid=grid, owned=owner is not None, key_runs=keys.runs, value_runs=values.runs, interpret=interpret
    )
    operands = by_head(packed, owner, with_rows(query, grid.rows), factors, keys.codes, values.codes)
    width = components_of(values.runs)
    part = launch("coefficient_attention", kernel, grid, packed, head, operands, width, interpret=interpret)
    return unpack(part, q.shape[1])


def _check(q, keys: Stored, values: Stored) -> None:
    """Raise `Unsupported` for what the kernel does not read."""
    if (keys.runs is None) != (values.runs is None):
        raise Unsupported("keys and values packed in several widths, or both not")
    if q.dtype.itemsize != 2:
        raise Unsupported(f"queries of dtype {q.dtype.name} over packed tokens")
    for name, side in (("keys", keys), ("values", values)):  # byte by byte an H200 takes 60 times as long
        if side.codes.shape[-1] % WORD:
            raise Unsupported(f"{name} packed in {side.codes.shape[-1]} bytes a token, no whole words of {WORD}")


def _kernel(limits_ref, *refs, grid: Grid, owned: bool, key_runs, value_runs, interpret: bool):
    (owner_ref, *refs) = refs if owned else (None, *refs)
    q_ref, factors_ref, k_ref, v_ref, out_ref, lse_ref = refs
    begin, end = load_ranges(limits_ref, grid.rows, lse_ref.shape[0])
    factor = LOG2_E * factors_ref[0]
    start, stop, high = tile_range(limits_ref, grid)
    value_windows = windows_of(value_runs, grid.warps * WINDOW)
    size, n = k_ref.shape[0], grid.tile

    def body(tile, carry):
        top, total, accs = carry
        # a mask of tokens would spill registers: the last tile begins where all of it is there, if it is anywhere
        at = tile * n if size % n == 0 else jnp.clip(size - n, 0, tile * n)
        inside = at + jnp.arange(n) < high

        def products(ref, windows):
            """Each product, and its numbers `[tile, bytes]`."""
            for window in windows:
                codes = load_window(ref, at, n, window)
                for product in window.products:
                    yield product, numbers_of(codes, product.mask, interpret)

        logits = jnp.zeros((n, grid.rows), jnp.float32)
        for product, keys in products(k_ref, windows_of(key_runs, WINDOW)):
            q = plgpu.load(q_ref.at[:, pl.ds(product.column, WINDOW)])
            logits += jnp.dot(keys, q.T, preferred_element_type=jnp.float32)
        seen = jnp.maximum(begin, tile * n), end  # of a tile that begins earlier, what no other has
        visible = visible_slots(at, inside, *seen, owner_ref, limits_ref[2] if owned else None, axis=0)
        weights, shrink, top, total = online_softmax(logits * factor[None], visible, top, total, 0, jnp.float16)
        accs = tuple(
            acc * shrink[None] + jnp.dot(values.T, weights, preferred_element_type=jnp.float32)
            for acc, (_, values) in zip(accs, products(v_ref, value_windows), strict=True)
        )
        return top, total, accs

    sums = tuple(jnp.zeros((own.size, grid.rows), jnp.float32) for own in value_windows for _ in own.products)
    top, total, sums = jax.lax.fori_loop(start, stop, body, (*start_carry(grid.rows, ())[:2], sums))
    _write(out_ref, lse_ref, factors_ref[1], value_windows, sums, top, total)


def _write(out_ref, lse_ref, above, windows, sums, top, total) -> None:
    """A split's partial, component by component; rows that saw nothing get (0, `EMPTY`)."""
    row = jnp.arange(top.shape[0])
    there, empty = row < lse_ref.shape[0], total == 0
    total = jnp.where(empty, 1.0, total)
    plgpu.store(lse_ref.at[row], jnp.where(empty, EMPTY, top / LOG2_E + jnp.log(total) - above), mask=there)
    for (size, product), own in zip([(w.size, x) for w in windows for x in w.products], sums, strict=True):
        byte = jnp.arange(size)
        mask = (byte >= product.first) & (byte < product.first + product.count)
        means = jnp.where(empty[None], 0.0, own * (product.scale / total)[None] - product.middle)
        at = [jnp.broadcast_to(x, own.shape) for x in (row[None], (product.component - product.first + byte)[:, None])]
        plgpu.store(out_ref.at[tuple(at)], means, mask=mask[:, None] & there[None])
