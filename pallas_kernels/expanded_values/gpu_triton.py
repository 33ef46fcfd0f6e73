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
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, head_spec, of_parts, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Others, load_block, load_columns, start_beside
from lowrank_kv_jax.pallas_kernels.owned_slots import rows_of
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, LOG2_E, columns, pack, power_of_two
from lowrank_kv_jax.storage.basis import Basis, Scaled, whole_basis
from lowrank_kv_jax.storage.cached_tokens import Beside
from lowrank_kv_jax.storage.eight_bits import EightBits

DTYPES = ("float32", "bfloat16", "float16")
BYTES = "uint8"
CHANNELS = 32  # of a program
TILE = 64  # other tokens that are read at once
FEW_SLOTS = 1024  # of other tokens: more are worth programs of their own
PIECE = 64  # components
COLUMNS = "columns"  # how the names of a basis' factors begin
TOGETHER = 16  # parts that are merged at once
ROWS = 16  # query heads of a program in float32


def expanded_values(
    basis: Basis, part: AttnPartial, kv_heads: int, mean: jax.Array | None, beside: Beside, *, scale: float,
    cap: float | None, interpret: bool,
) -> AttnPartial:
    """As `api.expanded_values`.

    Raises:
        Unsupported: capped logits, and queries that it does not take.
    """
    if cap is not None or not takes(beside.q, kv_heads):
        raise Unsupported("more than a query, capped logits, other numbers than floats, or many in float32")
    batch, each = part.out.shape[0], part.out.shape[2] // kv_heads
    operands, dim = _basis(basis, batch, kv_heads)
    heads = (batch, kv_heads, each)
    operands |= {"own": _operand(part.out.reshape(*heads, -1), batch, kv_heads),
                 "own_lse": _operand(part.lse.reshape(heads), batch, kv_heads)}
    if mean is not None:
        operands["mean"] = _operand(mean[None] if mean.ndim == 2 else mean, batch, kv_heads)
    return _launch(operands, beside, heads, dim, scale=scale, interpret=interpret)


def merged_parts(out: jax.Array, lse: jax.Array, beside: Beside, *, scale: float, interpret: bool) -> AttnPartial:
    """Other tokens merged with what has been attended of C parts of the stored ones, each in S splits, in head space.

    Args:
        out, lse: `[B, C, K, S, G, D]` and `[B, C, K, G, S]` of a query of each row, as of `gpu_launch.launch_splits`.
        beside: whose queries it `takes`.
        scale: as above.
    """
    batch, chunks, kv_heads, splits, each, dim = out.shape

    def of_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, chunks, None, *shape), lambda s, h, b: (b, 0, h, *(0,) * len(shape)))

    operands = {"parts": (out, of_head(splits, each, dim)), "parts_lse": (lse, of_head(each, splits))}
    return _launch(operands, beside, (batch, kv_heads, each), dim, scale=scale, interpret=interpret)


def _launch(
    operands: dict[str, Operand], beside: Beside, heads: tuple[int, int, int], dim: int, *, scale: float, interpret: bool
) -> AttnPartial:
    """Partial of B rows, K kv heads, G query heads each."""
    (batch, kv_heads, each), dtype, blocks = heads, beside.q.dtype, pl.cdiv(dim, CHANNELS)
    operands = operands | _others(beside, heads, scale)
    arrays, specs = zip(*((x, of_parts(spec, blocks)) for x, spec in operands.values()), strict=True)
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel, names=tuple(operands), grid=Grid(power_of_two(each, 16), TILE, 1, 2, 4), scale=scale, blocks=blocks,
            exact=dtype == jnp.float32,
        ),
        grid=(1, kv_heads * blocks, batch),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, each, dim), lambda s, h, b: (b, h // blocks, 0, 0)),
            pl.BlockSpec((None, None, each), lambda s, h, b: (b, h // blocks, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*heads, dim), dtype),
            jax.ShapeDtypeStruct(heads, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="expanded_values",
    )(*arrays)
    return AttnPartial(out.reshape(batch, 1, -1, dim).astype(jnp.float32), lse.reshape(batch, 1, -1))


def takes(q: jax.Array, kv_heads: int) -> bool:
    """Whether queries `[B, T, N, D]` are one of each row, in `DTYPES`, in float32 of at most `ROWS` heads a kv head: more
    would spill registers."""
    many = q.dtype == jnp.float32 and q.shape[2] // kv_heads > ROWS
    return q.shape[1] == 1 and q.dtype.name in DTYPES and not many


def _operand(x: jax.Array, rows: int, heads: int) -> Operand:
    return x, head_spec(x, rows, heads)


def _basis(basis: Basis, rows: int, kv_heads: int) -> tuple[dict[str, Operand], int]:
    """A basis `[B or 1, K, D, R]`, of one in factors these `[B or 1, J, R]` and weights `[1, K, D]`; and D."""
    *_, units, width, rank = basis.shape
    factors, dim = isinstance(basis, Scaled), units * width // kv_heads
    numbers, first = (basis.directions, None) if factors else whole_basis(basis, dim)
    numbers = numbers.reshape(len(numbers) if numbers.ndim == 4 else 1, -1, dim, rank)
    found = {"basis": (numbers, head_spec(numbers, rows, kv_heads, first))}
    if factors:
        of_rows = (x if x.ndim == 3 else x.reshape(1, -1, rank) for x in basis.factors)
        found |= {f"{COLUMNS}{number}": _operand(x, rows, kv_heads) for number, x in enumerate(of_rows)}
    if factors and basis.weights is not None:
        found["weights"] = _operand(basis.weights.reshape(1, kv_heads, -1), rows, kv_heads)
    return found, dim


def _others(beside: Beside, heads: tuple[int, int, int], scale: float) -> dict[str, Operand]:
    """What `Others` refer to, or a partial of them."""
    (batch, kv_heads, _), dtypes = heads, DTYPES
    rows = rows_of(beside.q, beside.tokens, beside.q_positions, beside.causal, beside.window)
    kept: Any = rows.tokens[:2]
    if all(isinstance(x, EightBits) for x in kept) and beside.q.dtype != jnp.float32:  # which would spill registers
        kept, dtypes = [x.rows for x in kept], (BYTES,)
    read = all(isinstance(x, jax.Array) and x.dtype.name in dtypes for x in kept) and rows.owner is None
    if not read or kept[0].shape[2] > FEW_SLOTS:
        out, lse = attend_to(beside, scale=scale)
        found = {"out": out.reshape(*heads, -1), "lse": lse.reshape(heads)}
        return {name: _operand(x, batch, kv_heads) for name, x in found.items()}
    packed = pack(beside.q, kv_heads, rows.begin, rows.end)
    ranges = {name: (x, row_spec(x, batch)) for name, x in (("begin", packed.begin), ("end", packed.end))}
    return ranges | dict(zip(("q", "keys", "values"), by_head(packed, packed.q, *kept), strict=True))


def _kernel(*refs, names: tuple[str, ...], grid: Grid, scale: float, blocks: int, exact: bool):
    *given, out_ref, lse_ref = refs
    of, (each, dim) = dict(zip(names, given, strict=True)), out_ref.shape
    channel = pl.program_id(1) % blocks * CHANNELS + jnp.arange(CHANNELS)
    row, inside = jnp.arange(grid.rows), channel < dim
    there = row < each
    if "keys" in of:
        others, behind = Others(*(of[name] for name in Others._fields)), of["keys"].dtype.name == BYTES
        top, total, (sums,) = start_beside([others], grid, scale, [channel], each, behind)
    else:
        top = _base_2(of["lse"], row, there)
        total, sums = jnp.where(top > EMPTY / 2, 1.0, 0.0), load_columns(of["out"], 0, there, channel)
    if "parts" in of:
        top, total, sums = _with_parts((top, total, sums), of["parts"], of["parts_lse"], there, channel)
    else:
        factors = [ref for name, ref in of.items() if name.startswith(COLUMNS)]
        expanded = _expanded(of["own"], of["basis"], factors, there, channel, exact)
        for name, join, other in (("weights", jnp.divide, 1.0), ("mean", jnp.add, 0.0)):
            if name in of:
                numbers = plgpu.load(of[name].at[channel], mask=inside, other=other)
                expanded = join(expanded, numbers.astype(jnp.float32)[None])
        top, total, sums = _with_part((top, total, sums), expanded, _base_2(of["own_lse"], row, there))
    some = jnp.where(total == 0, 1.0, total)
    out = sums / some[:, None]
    at = tuple(jnp.broadcast_to(x, out.shape) for x in (row[:, None], channel[None]))
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=there[:, None] & inside[None])
    lse = jnp.where(total == 0, -jnp.inf, top / LOG2_E + jnp.log(some))
    plgpu.store(lse_ref.at[row], lse, mask=there)


def _with_part(carry, out, lse):
    """Running maximum (base 2), sum and outputs `[rows, channels]` with a part added, lse in base 2."""
    top, total, sums = carry
    highest = jnp.maximum(top, lse)
    weights = [jnp.where(x > EMPTY / 2, jnp.exp2(x - highest), 0.0) for x in (top, lse)]
    return highest, total * weights[0] + weights[1], sums * weights[0][:, None] + out * weights[1][:, None]


def _with_parts(carry, parts_ref, lse_ref, there, channel):
    """The same with parts `[C, S, G, D]`, some at a time."""
    chunks, splits, _, dim = parts_ref.shape
    count, row = chunks * splits, jnp.arange(there.shape[0])

    def add(block, carry):
        top, total, sums = carry
        number = block * TOGETHER + jnp.arange(TOGETHER)
        mask = (number < count)[:, None] & there[None]
        chunk, split, rows = (
            jnp.broadcast_to(x, mask.shape) for x in ((number // splits)[:, None], (number % splits)[:, None], row[None]))
        lse = jnp.maximum(plgpu.load(lse_ref.at[chunk, rows, split], mask=mask, other=EMPTY) * LOG2_E, EMPTY)
        inside = mask[..., None] & (channel < dim)[None, None]
        at = (*(x[..., None] for x in (chunk, split, rows)), channel[None, None])
        found = plgpu.load(
            parts_ref.at[tuple(jnp.broadcast_to(x, inside.shape) for x in at)], mask=inside, other=0.0)
        highest = jnp.maximum(top, jnp.max(lse, axis=0))
        weight = jnp.where(lse > EMPTY / 2, jnp.exp2(lse - highest[None]), 0.0)
        shrink = jnp.exp2(top - highest)
        sums = sums * shrink[:, None] + jnp.sum(weight[..., None] * found, axis=0)
        return highest, total * shrink + jnp.sum(weight, axis=0), sums

    return jax.lax.fori_loop(0, pl.cdiv(count, TOGETHER), add, carry)


def _base_2(lse_ref, row, there):
    """A log-sum-exp `[rows]` in base 2, `EMPTY` where there is none."""
    return jnp.maximum(plgpu.load(lse_ref.at[row], mask=there, other=EMPTY) * LOG2_E, EMPTY)


def _expanded(own_ref, basis_ref, factors, there, channel, exact: bool):
    """Float32 `[rows, channels]` of coefficients `[G, R]` and some rows of a basis `[D, R]`."""
    sums, width = jnp.zeros((there.shape[0], channel.shape[0]), jnp.float32), own_ref.shape[1]
    precision = jax.lax.Precision.HIGHEST if exact else None
    for piece in columns(width, PIECE):
        own, component = load_block(own_ref, 0, there, piece), piece[0] + jnp.arange(piece[1])
        for ref in factors:
            own = own * plgpu.load(ref.at[component], mask=component < width, other=0.0).astype(jnp.float32)[None]
        at = tuple(jnp.broadcast_to(x, (channel.shape[0], piece[1])) for x in (channel[:, None], component[None]))
        mask = (channel < basis_ref.shape[0])[:, None] & (component < width)[None]
        basis = plgpu.load(basis_ref.at[at], mask=mask, other=0).astype(jnp.float32)
        sums += jnp.dot(own, basis.T, preferred_element_type=jnp.float32, precision=precision)
    return sums
