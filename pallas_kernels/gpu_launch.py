"""Launches of the Triton kernels: a program for each split of the tokens, head and row, whose partials XLA merges."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import gpu_merge
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Limits, Others
from lowrank_kv_jax.pallas_kernels.owned_slots import Rows
from lowrank_kv_jax.pallas_kernels.packing import Packed, merge_splits, pack, stored_arrays

SIGNED = 2**31
"""Numbers that 32 signed bits tell. Pallas counts in 64 from 2^32 *bytes* on: what has two bytes and more is safe."""

Operand = tuple[jax.Array, pl.BlockSpec]
"""An array, and what a program reads of it."""


def launch(
    name: str, kernel: Callable[..., None], grid: Grid, packed: Packed, told: Sequence[jax.Array],
    operands: Sequence[Operand], width: int, *, interpret: bool, beside: Sequence[Rows] = (), reads_lse: bool = False,
) -> AttnPartial:
    """Partial `[B, H, M, width]`, float32, lse -inf where a row sees nothing.

    Args:
        reads_lse: whether the log-sum-exp is read, too, as where values are expanded behind: a kernel merges both then.
            Outputs alone XLA merges and rounds by one program.
        name, kernel, grid, packed, told, operands, width, beside: as of `launch_splits`.
    """
    out, lse = launch_splits(name, kernel, grid, packed, told, operands, width, interpret=interpret, beside=beside)
    return gpu_merge.merge_splits(out, lse, interpret=interpret) if reads_lse else merge_splits(out, lse)


def launch_splits(
    name: str, kernel: Callable[..., None], grid: Grid, packed: Packed, told: Sequence[jax.Array],
    operands: Sequence[Operand], width: int, *, interpret: bool, beside: Sequence[Rows] = (),
) -> tuple[jax.Array, jax.Array]:
    """Partials of the splits as `merge_splits` takes them, of `packed.rows` rows.

    Args:
        kernel: takes `Limits` of a row, and references: the operands, its out `[M, width]` and lse `[M]`.
        packed: queries.
        told: what else a row's programs are told, int32 `[B, n]` each: as they come, because what XLA puts together first
            is a launch of its own.
        beside: other tokens that the kernel reads.
    """
    limits = [(x, row_spec(x, packed.rows)) for x in (packed.begin, packed.end, *told)]

    def with_limits(begin, end, *refs):
        more, refs = refs[: len(told)], refs[len(told) :]
        each = len(Others._fields)
        others = [Others(*refs[each * i : each * (i + 1)]) for i in range(len(beside))]
        kernel(Limits(begin, end, more, others), *refs[each * len(beside) :])

    batch, (_, heads, rows, _) = packed.rows, packed.q.shape
    others = [operand for own in beside for operand in _others(packed, own)]
    arrays, specs = zip(*limits, *others, *operands, strict=True)
    shapes = (batch, heads, grid.splits, rows, width), (batch, heads, rows, grid.splits)
    return pl.pallas_call(
        with_limits,
        grid=(grid.splits, heads, batch),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda s, h, b: (b, h, s, 0, 0)),
            pl.BlockSpec((None, None, rows, None), lambda s, h, b: (b, h, 0, s)),
        ],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def _others(packed: Packed, beside: Rows) -> list[Operand]:
    """What `Others` refer to."""
    own = pack(beside.q, packed.q.shape[1], beside.begin, beside.end)
    keys, values = (stored_arrays(x).codes for x in beside.tokens[:2])
    ranges = [(x, row_spec(x, packed.rows)) for x in (own.begin, own.end)]
    return [*ranges, *by_head(packed, own.q, keys, values)]


def row_spec(x: jax.Array, rows: int) -> pl.BlockSpec:
    """What row `b` of `rows` has of `x` `[B', ..]`, whose B' rows they share in order."""
    share = rows // x.shape[0]
    return pl.BlockSpec((None, *x.shape[1:]), lambda s, h, b: (b // share, *(0,) * (x.ndim - 1)))


def by_head(packed: Packed, *arrays: Any) -> list[Operand]:
    """Of arrays `[B', J, ..]`, None left out, the row and head that serve a program's.

    Raises:
        Unsupported: bytes whose numbers 32 bits cannot tell.
    """
    rows, heads = packed.rows, packed.q.shape[1]
    found = [x for x in arrays if x is not None]
    check_bytes(found)
    return [(x, head_spec(x, rows, heads)) for x in found]


def check_bytes(arrays: Sequence[jax.Array]) -> None:
    """Raise `Unsupported` for bytes whose numbers 32 bits cannot tell."""
    if wide := [x.size for x in arrays if x.dtype.itemsize == 1 and SIGNED < x.size <= 2 * SIGNED]:
        raise Unsupported(f"{wide[0]} bytes of codes, which Pallas would count in 32 bits; must be at most {SIGNED}, or "
                          f"above {2 * SIGNED}")


def head_spec(x: jax.Array, rows: int, heads: int, first: int | None = None) -> pl.BlockSpec:
    """What head `h` of `heads` of row `b` of `rows` has of `x` `[B', J, ..]`, of which others in order have the same.

    Args:
        first: of more heads than those, which is the first of them.
    """
    share, shared = rows // x.shape[0], heads // x.shape[1] if first is None else 1
    rest, begin = (0,) * (x.ndim - 2), first or 0
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda s, h, b: (b // share, begin + h // shared, *rest))


def of_parts(spec: pl.BlockSpec, parts: int) -> pl.BlockSpec:
    """What all parts of a head read, of programs of which so many behind each other serve a head."""
    return pl.BlockSpec(spec.block_shape, lambda s, h, b: spec.index_map(s, h // parts, b))
