"""Decode attention over coefficients for GPUs: a Pallas kernel in its Triton dialect.

A program serves the query rows of one kv head (its G query heads side by side, padded to a tensor core's 16) over one
split of the tokens, and writes a float32 partial; the few partials of the splits are merged by XLA.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, decode_grid
from lowrank_kv_jax.pallas_kernels.packing import (
    EMPTY,
    LOG2_E,
    TILE_OF_SCALES,
    Packed,
    Stored,
    columns,
    merge_splits,
    pack,
    stored_arrays,
    unpack,
    visible_range,
)
from lowrank_kv_jax.partial import AttnPartial

DTYPES = ("float32", "bfloat16", "float16", "int8")


def coefficient_attention(q, tokens, *, scale, q_positions, causal, window, interpret=False) -> AttnPartial:
    """The op of `api.coefficient_attention`; `Unsupported` where the kernel does not cover a case."""
    keys, values = stored_arrays(tokens.keys), stored_arrays(tokens.values)
    begin, end = visible_range(tokens, q_positions, causal, window)
    packed = pack(q, max(keys.codes.shape[1], values.codes.shape[1]), begin, end)
    part = attend_packed(packed, keys, values, scale=scale, interpret=interpret)
    return unpack(part, q.shape[1])


def attend_packed(packed: Packed, keys: Stored, values: Stored, *, scale: float, interpret: bool) -> AttnPartial:
    """Partial `[B, H, M, Rv]`, lse `EMPTY` where a row sees nothing."""
    check_stored(packed, keys, values)
    batch, heads, rows, _ = packed.q.shape
    grid = decode_grid(rows, batch * heads, keys.codes.shape[2], bytes_of_token(keys) + bytes_of_token(values))
    shape = (batch, heads, grid.splits, rows)
    width = values.codes.shape[-1]
    kernel = functools.partial(_kernel, grid=grid, scale=scale, quantised=keys.scales is not None)
    arrays = (packed.span, packed.begin, packed.end, packed.q, *given(keys), *given(values))
    specs = [row_spec(packed.span), row_spec(packed.begin), row_spec(packed.end), head_spec(packed.q, heads)]
    specs += [head_spec(x, heads) for x in (*given(keys), *given(values))]
    out, lse = pl.pallas_call(
        kernel,
        grid=(grid.splits, heads, batch),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda s, h, b: (b, h, s, 0, 0)),
            pl.BlockSpec((None, None, None, rows), lambda s, h, b: (b, h, s, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct((*shape, width), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name="coefficient_attention",
    )(*arrays)
    return merge_splits(out, lse)


def check_stored(packed: Packed, keys: Stored, values: Stored) -> None:
    """Raise `Unsupported` for storage that the GPU kernels do not read."""
    for name, x in (("keys", keys), ("values", values)):
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


def given(stored: Stored) -> list[jax.Array]:
    """The arrays that there are."""
    return [stored.codes] if stored.scales is None else [stored.codes, stored.scales]


def row_spec(x: jax.Array) -> pl.BlockSpec:
    """A batch row of `x` `[B, ..]`."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda s, h, b: (b, *(0,) * (x.ndim - 1)))


def head_spec(x: jax.Array, heads: int) -> pl.BlockSpec:
    """The head of `x` `[B, J, ..]` that serves head `h` of `heads`."""
    shared = heads // x.shape[1]
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda s, h, b: (b, h // shared, *(0,) * (x.ndim - 2)))


def tile_range(span_ref, grid: Grid):
    """The tiles of this program's split, and the end of the valid slots."""
    low, high = span_ref[0], span_ref[1]
    first = low // grid.tile
    start, stop = split_range(pl.cdiv(high, grid.tile) - first, grid)
    return first + start, first + stop, high


def split_range(tiles, grid: Grid):
    """This program's share of `tiles`: those that are valid, not those of the buffer, are shared out."""
    each = jnp.maximum(pl.cdiv(tiles, grid.splits), min(2, grid.splits))
    start = pl.program_id(0) * each
    return start, jnp.minimum(start + each, tiles)


def load_rows(ref, rows: int, *cols, other=0):
    """The first `rows` of `ref` `[M, ..]`, those beyond M filled with `other`."""
    inside = jnp.arange(rows) < ref.shape[0]
    mask = inside[:, None] if cols else inside
    return plgpu.load(ref.at[(pl.ds(0, rows), *cols)], mask=mask, other=other)


def online_softmax(logits, visible, top, total):
    """One tile into the running maximum and sum (base 2): weights, and the factor that shrinks what is there."""
    logits = jnp.where(visible, logits, EMPTY)
    new_top = jnp.maximum(top, jnp.max(logits, axis=1))
    weights = jnp.where(visible, jnp.exp2(logits - new_top[:, None]), 0.0)
    shrink = jnp.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + jnp.sum(weights, axis=1)


def add_values(weights, shrink, accs, pieces, load, scales, tile):
    """Weighted values of a tile, piece by piece of their columns."""
    out = []
    for acc, (c, w) in zip(accs, pieces, strict=True):
        added = dot(weights, load(c, w).astype(weights.dtype))
        if scales is not None:
            added = added * scales[tile, pl.ds(c, w)].astype(jnp.float32)[None]
        out.append(acc * shrink[:, None] + added)
    return tuple(out)


def dot(a, b):
    """Product in float32; operands in float32 are multiplied as such, not as TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def write_partial(out_ref, lse_ref, rows: int, accs, pieces, top, total) -> None:
    """Store a split's partial; rows that saw nothing get (0, `EMPTY`)."""
    inside = jnp.arange(rows) < lse_ref.shape[0]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, EMPTY, top / LOG2_E + jnp.log(total))
    plgpu.store(lse_ref.at[pl.ds(0, rows)], lse, mask=inside)
    for acc, (c, w) in zip(accs, pieces, strict=True):
        plgpu.store(out_ref.at[pl.ds(0, rows), pl.ds(c, w)], acc / total[:, None], mask=inside[:, None])


def start_carry(rows: int, pieces):
    """Running maximum, sum and outputs of no tokens."""
    top, total = jnp.full((rows,), EMPTY, jnp.float32), jnp.zeros((rows,), jnp.float32)
    return top, total, tuple(jnp.zeros((rows, w), jnp.float32) for _, w in pieces)


def _kernel(span_ref, begin_ref, end_ref, q_ref, *refs, grid: Grid, scale: float, quantised: bool):
    if quantised:
        k_ref, ks_ref, v_ref, vs_ref, out_ref, lse_ref = refs
    else:
        (k_ref, v_ref, out_ref, lse_ref), ks_ref, vs_ref = refs, None, None
    key_pieces, value_pieces = columns(k_ref.shape[-1]), columns(v_ref.shape[-1])
    begin, end = load_rows(begin_ref, grid.rows), load_rows(end_ref, grid.rows)
    queries = [load_rows(q_ref, grid.rows, pl.ds(c, w)) for c, w in key_pieces]
    start, stop, high = tile_range(span_ref, grid)

    def body(tile, carry):
        top, total, accs = carry
        at = tile * grid.tile
        slots = at + jnp.arange(grid.tile)
        inside = (slots < high)[:, None]

        def read(ref, c, w):
            return plgpu.load(ref.at[pl.ds(at, grid.tile), pl.ds(c, w)], mask=inside, other=0)

        logits = jnp.zeros((grid.rows, grid.tile), jnp.float32)
        scale_row = at // TILE_OF_SCALES
        for q, (c, w) in zip(queries, key_pieces, strict=True):
            if ks_ref is not None:
                q = (q.astype(jnp.float32) * ks_ref[scale_row, pl.ds(c, w)].astype(jnp.float32)[None]).astype(q.dtype)
            logits += dot(q, read(k_ref, c, w).astype(q.dtype).T)
        visible = (slots[None] >= begin[:, None]) & (slots[None] < end[:, None])
        weights, shrink, top, total = online_softmax(logits * (scale * LOG2_E), visible, top, total)
        weights = weights.astype(q_ref.dtype)
        accs = add_values(weights, shrink, accs, value_pieces, functools.partial(read, v_ref), vs_ref, scale_row)
        return top, total, accs

    top, total, accs = jax.lax.fori_loop(start, stop, body, start_carry(grid.rows, value_pieces))
    write_partial(out_ref, lse_ref, grid.rows, accs, value_pieces, top, total)
