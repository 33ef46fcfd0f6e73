"""Values expanded on a GPU: a Pallas kernel in its Triton dialect, a program for some channels of a kv head of a row.

It attends to a few other tokens by itself, each program to all of them, which spares a launch. More, and tokens that are
no arrays, come as their partial.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, check_bytes, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Others, load_block, load_columns, start_beside
from lowrank_kv_jax.pallas_kernels.owned_slots import rows_of
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, LOG2_E, columns, pack, power_of_two
from lowrank_kv_jax.storage.basis import Basis, Scaled
from lowrank_kv_jax.storage.cached_tokens import Beside
from lowrank_kv_jax.storage.eight_bits import EightBits

DTYPES = ("float32", "bfloat16", "float16")
CHANNELS = 32  # of a program
TILE = 64  # other tokens that are read at once
FEW_SLOTS = 1024  # of other tokens: more are worth programs of their own
PIECE = 64  # components
ROWS = 16


def expanded_values(
    basis: Basis, part: AttnPartial, kv_heads: int, mean: jax.Array | None, beside: Beside, *, scale: float,
    cap: float | None, interpret: bool,
) -> AttnPartial:
    """As `api.expanded_values`.

    Raises:
        Unsupported: more than a query of each row, capped logits, other dtypes than `DTYPES`, in float32 more than
            `ROWS` query heads a kv head, which would spill registers.
    """
    (batch, queries, q_heads, _), dtype = part.out.shape, beside.q.dtype
    if queries != 1 or cap is not None or dtype.name not in DTYPES:
        raise Unsupported("more than a query, capped logits, or other numbers than floats")
    each = q_heads // kv_heads
    if dtype == jnp.float32 and each > ROWS:
        raise Unsupported(f"{each} query heads a kv head in float32, allowed are {ROWS}")

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(batch, kv_heads, each, *x.shape[3:])

    of_basis, dim = _basis(basis, kv_heads)
    blocks = pl.cdiv(dim, CHANNELS)
    others, read, behind = _others(beside, kv_heads, scale, by_head)
    operands = [*others, *map(_of_head, (by_head(part.out), by_head(part.lse))), *of_basis,
                *([] if mean is None else [_of_some_rows(mean[None] if mean.ndim == 2 else mean)])]
    arrays, specs = zip(*((x, _within(spec, blocks)) for x, spec in operands), strict=True)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, grid=Grid(power_of_two(each, 16), TILE, 1, 2, 4), scale=scale, read=read, behind=behind,
            blocks=blocks, scaled=[basis.rows is not None] if isinstance(basis, Scaled) else [],
            centred=mean is not None, exact=dtype == jnp.float32,
        ),
        grid=(1, kv_heads * blocks, batch),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, each, dim), lambda s, h, b: (b, h // blocks, 0, 0)),
            pl.BlockSpec((None, None, each), lambda s, h, b: (b, h // blocks, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, each, dim), dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, each), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="expanded_values",
    )(*arrays)
    return AttnPartial(out.reshape(batch, 1, q_heads, dim).astype(jnp.float32), lse.reshape(batch, 1, q_heads))


def _within(spec: pl.BlockSpec, blocks: int) -> pl.BlockSpec:
    """What all programs of a head read."""
    return pl.BlockSpec(spec.block_shape, lambda s, h, b: spec.index_map(s, h // blocks, b))


def _of_head(x: jax.Array) -> Operand:
    """What a head of a row has of `[B, K, ..]`."""
    rest = (0,) * (x.ndim - 2)
    return x, pl.BlockSpec((None, None, *x.shape[2:]), lambda s, h, b: (b, h, *rest))


def _of_some_rows(x: jax.Array) -> Operand:
    """The same of `[B or 1, K, ..]`."""
    rest, rows = (0,) * (x.ndim - 2), len(x)
    return x, pl.BlockSpec((None, None, *x.shape[2:]), lambda s, h, b: (b if rows > 1 else 0, h, *rest))


def _basis(basis: Basis, kv_heads: int) -> tuple[list[Operand], int]:
    """A basis `[B or 1, K, D, R]`, of one in factors its columns `[B or 1, J, R]` and rows `[1, K, D]`; and D."""
    numbers = basis.directions if isinstance(basis, Scaled) else basis
    numbers = numbers if numbers.ndim == 4 else numbers[None]
    by_head = numbers.reshape(len(numbers), kv_heads, -1, numbers.shape[-1])
    found = [_of_some_rows(by_head)]
    if isinstance(basis, Scaled):
        components = basis.columns if basis.columns.ndim == 3 else basis.columns[None]
        shared, spec = kv_heads // components.shape[1], _of_some_rows(components)[1]
        found.append((components, pl.BlockSpec(spec.block_shape, lambda s, h, b: spec.index_map(s, h // shared, b))))
        if basis.rows is not None:
            found.append(_of_some_rows(basis.rows.reshape(1, kv_heads, -1)))
    return found, by_head.shape[2]


def _others(beside: Beside, kv_heads: int, scale: float, by_head) -> tuple[list[Operand], bool, bool]:
    """What `Others` refer to, or a partial; whether it is the first, and whether that is rows of `EightBits`."""
    rows = rows_of(beside.q, beside.tokens, beside.q_positions, beside.causal, beside.window)
    kept: Any = rows.tokens[:2]
    behind = all(isinstance(x, EightBits) for x in kept)
    kept = [x.rows for x in kept] if behind else kept
    dtypes = ("uint8",) if behind else DTYPES
    read = all(isinstance(x, jax.Array) and x.dtype.name in dtypes for x in kept) and rows.owner is None
    if not read or kept[0].shape[2] > FEW_SLOTS:
        return [_of_head(by_head(x)) for x in attend_to(beside, scale=scale)], False, False
    check_bytes(kept)
    packed = pack(beside.q, kv_heads, rows.begin, rows.end)
    ranges = [(x, row_spec(x, len(packed.q))) for x in (packed.begin, packed.end)]
    return [*ranges, *map(_of_head, (packed.q, *kept))], True, behind


def _kernel(
    *refs, grid: Grid, scale: float, read: bool, behind: bool, blocks: int, scaled: list[bool], centred: bool, exact: bool
):
    *refs, out_ref, lse_ref = refs
    count, (each, dim) = 5 if read else 2, out_ref.shape
    others, (own_ref, own_lse_ref, basis_ref, *refs) = refs[:count], refs[count:]
    column_ref, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    row_ref, refs = (refs[0], refs[1:]) if any(scaled) else (None, refs)
    channel = pl.program_id(1) % blocks * CHANNELS + jnp.arange(CHANNELS)
    row, inside = jnp.arange(grid.rows), channel < dim
    there = row < each
    if read:
        top, total, (sums,) = start_beside(Others(*others), grid, scale, [channel], each, behind)
    else:
        top, total = _base_2(others[1], row, there), jnp.ones((grid.rows,), jnp.float32)
        sums = load_columns(others[0], 0, there, channel)
    expanded = _expanded(own_ref, basis_ref, column_ref, there, channel, exact)
    for ref, join in ((row_ref, jnp.multiply), (refs[0] if centred else None, jnp.add)):
        if ref is not None:
            expanded = join(expanded, plgpu.load(ref.at[channel], mask=inside, other=0.0).astype(jnp.float32)[None])
    own = _base_2(own_lse_ref, row, there)
    highest = jnp.maximum(top, own)
    weights = [jnp.where(x > EMPTY / 2, jnp.exp2(x - highest), 0.0) for x in (top, own)]
    together = total * weights[0] + weights[1]
    some = jnp.where(together == 0, 1.0, together)
    out = (sums * weights[0][:, None] + expanded * weights[1][:, None]) / some[:, None]
    at = tuple(jnp.broadcast_to(x, out.shape) for x in (row[:, None], channel[None]))
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=there[:, None] & inside[None])
    lse = jnp.where(together == 0, -jnp.inf, highest / LOG2_E + jnp.log(some))
    plgpu.store(lse_ref.at[row], lse, mask=there)


def _base_2(lse_ref, row, there):
    """A log-sum-exp `[rows]` in base 2, `EMPTY` where there is none."""
    return jnp.maximum(plgpu.load(lse_ref.at[row], mask=there, other=EMPTY) * LOG2_E, EMPTY)


def _expanded(own_ref, basis_ref, column_ref, there, channel, exact: bool):
    """Float32 `[rows, channels]` of coefficients `[G, R]` and some rows of a basis `[D, R]`."""
    sums, width = jnp.zeros((there.shape[0], channel.shape[0]), jnp.float32), own_ref.shape[1]
    precision = jax.lax.Precision.HIGHEST if exact else None
    for piece in columns(width, PIECE):
        own, component = load_block(own_ref, 0, there, piece), piece[0] + jnp.arange(piece[1])
        if column_ref is not None:
            own = own * plgpu.load(column_ref.at[component], mask=component < width, other=0.0)[None]
        at = tuple(jnp.broadcast_to(x, (channel.shape[0], piece[1])) for x in (channel[:, None], component[None]))
        mask = (channel < basis_ref.shape[0])[:, None] & (component < width)[None]
        basis = plgpu.load(basis_ref.at[at], mask=mask, other=0).astype(jnp.float32)
        sums += jnp.dot(own, basis.T, preferred_element_type=jnp.float32, precision=precision)
    return sums
