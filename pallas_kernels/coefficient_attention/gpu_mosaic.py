"""Decode attention over coefficients for Hopper GPUs: a Pallas kernel in its Mosaic GPU dialect (jax >= 0.11).

As in the Triton kernel a program serves the query rows of one kv head over one split of the tokens and writes a float32
partial. Here one warpgroup multiplies with wgmma, whose 64 rows hold every query row of a head that the op takes, while
TMA copies the next tiles of tokens into shared memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import CORES, LEAST_TILES, WAVES
from lowrank_kv_jax.pallas_kernels.packing import (
    EMPTY,
    LOG2_E,
    MAX_ROWS,
    Packed,
    merge_splits,
    pack,
    ranges_of_rows,
    stored_arrays,
    unpack,
)

LEAST_JAX, LEAST_COMPILER = (0, 11), (0, 12)
HOPPER = "9.0"  # the compute capability whose wgmma this is
DTYPES = ("bfloat16", "float16")
ROWS = MAX_ROWS  # of a wgmma
MATRIX = plgpu.Layout.WGMMA  # how a warpgroup holds one
WIDEST, STEP = 256, 16  # columns of a wgmma at most, and the 16-bit numbers that TMA and wgmma step by
IN_FLIGHT = 64 * 1024  # bytes of tiles in shared memory; programs share a core in twos
SHARED = 223 * 1024  # bytes of shared memory that a program has, less some KiB for barriers and alignment
MOST_STAGES = 6


def reads_beside(tokens, others) -> bool:
    """As of `gpu_triton`."""
    del tokens, others
    return False


def attend_slots(
    q, tokens, begin, end, *, scale: float, size: int, interpret: bool, owner: jax.Array | None = None
) -> AttnPartial:
    """Queries `[B, T, N, Rk]` over the slots `begin <= slot < end` `[B, T]` of tokens that B / B' rows in order share.

    Args:
        size: about how many tokens a row sees at most; decides into how many splits they are cut.
        owner: None; tokens that it tells apart are not covered.
    """
    if owner is not None:
        raise Unsupported("tokens of all heads packed in one buffer")
    _check_machine(interpret)
    keys, values = (_stored(getattr(tokens, name), name, q.dtype) for name in ("keys", "values"))
    packed = pack(q, max(keys.shape[1], values.shape[1]), begin, end)
    return unpack(_attend(packed, keys, values, scale=scale, size=size, interpret=interpret), q.shape[1])


def _check_machine(interpret: bool) -> None:
    least = LEAST_JAX if interpret else LEAST_COMPILER
    if jax.version.__version_info__ < least:
        raise Unsupported(f"Mosaic GPU kernels take jax >= {'.'.join(map(str, least))}, this is {jax.__version__}")
    found = None if interpret else getattr(jax.devices()[0], "compute_capability", None)
    if found not in (None, HOPPER):
        raise Unsupported(f"a GPU of compute capability {found}, the kernel is for {HOPPER} (Hopper)")


def _stored(tokens, name: str, dtype) -> jax.Array:
    codes = stored_arrays(tokens).codes
    if codes.dtype.name not in DTYPES or codes.dtype != dtype:
        raise Unsupported(f"{name} of dtype {codes.dtype.name} under queries of dtype {dtype.name}, allowed is one of "
                          f"{' and '.join(DTYPES)} for both")
    if codes.shape[-1] % STEP or codes.shape[-1] > WIDEST:
        raise Unsupported(f"{name} of width {codes.shape[-1]}, allowed are multiples of {STEP} up to {WIDEST}")
    return codes


class _Plan(NamedTuple):
    """Static shape of a launch: tokens of a tile, tiles under way, programs that share the tokens of a head."""

    tile: int
    stages: int
    splits: int


def _plan(programs: int, size: int, token_bytes: int) -> _Plan:
    tile = 128 if 2 * 128 * token_bytes <= IN_FLIGHT else 64
    stages = max(2, min(MOST_STAGES, IN_FLIGHT // (tile * token_bytes)))
    return _Plan(tile, stages, max(1, min(pl.cdiv(size, tile * LEAST_TILES), CORES * WAVES // programs)))


def _attend(
    packed: Packed, keys: jax.Array, values: jax.Array, *, scale: float, size: int, interpret: bool
) -> AttnPartial:
    """Partial `[B, H, M, Rv]`, lse `EMPTY` where a row sees nothing."""
    batch, heads, rows, _ = packed.q.shape
    width, token_bytes = values.shape[-1], sum(x.shape[-1] * x.dtype.itemsize for x in (keys, values))
    plan = _plan(batch * heads, size, token_bytes)
    if plan.tile * plan.stages * token_bytes + ROWS * (packed.q.shape[-1] * packed.q.dtype.itemsize + 4 * width) > SHARED:
        raise Unsupported(f"keys of width {packed.q.shape[-1]} and values of {width} do not fit into shared memory")
    missing = (0, ROWS - rows)
    q = jnp.pad(packed.q, ((0, 0), (0, 0), missing, (0, 0)))
    begin, end = (jnp.pad(x, ((0, 0), missing)) for x in ranges_of_rows(packed))
    shape = (batch, heads, plan.splits, ROWS)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, plan=plan, scale=scale, interpret=interpret),
        out_type=(jax.ShapeDtypeStruct((*shape, width), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        scratch_types=(
            plgpu.SMEM(q.shape[2:], q.dtype, transforms=_tiled(q)), plgpu.Barrier(),
            plgpu.SMEM((ROWS, width), jnp.float32), plgpu.SMEM((ROWS,), jnp.float32),
        ),
        grid=(plan.splits, heads, batch),
        grid_names=("split", "head", "row"),
        kernel_name="coefficient_attention",
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan") if interpret else None,
    )(q, keys, values, begin, end, packed.span)
    return merge_splits(out[:, :, :, :rows], lse[:, :, :, :rows].swapaxes(2, 3))


def _tiled(x):
    """How a matrix as wide as `x` lies in shared memory for wgmma."""
    itemsize = jnp.dtype(x.dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * itemsize * x.shape[-1])
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(q_ref, k_ref, v_ref, begin_ref, end_ref, span_ref, out_ref, lse_ref, q_smem, arrived, out_smem, lse_smem,
            *, plan: _Plan, scale: float, interpret: bool):
    split, head, row = (jax.lax.axis_index(name) for name in ("split", "head", "row"))
    plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, arrived)
    plgpu.barrier_wait(arrived)
    begin, end = (plgpu.load(ref.at[row], layout=MATRIX.reduce(1)) for ref in (begin_ref, end_ref))
    high = span_ref[row, 1]
    first, tiles = _share(span_ref[row, 0], high, split, plan)

    def attend_tile(indices, k_smem, v_smem, carry):
        top, total, acc = carry
        at = (first + indices[0]) * plan.tile
        pl.when(at + plan.tile > high)(functools.partial(_clear_stale, v_smem, high - at))
        logits = _product(q_smem, k_smem.transpose((1, 0)), (ROWS, plan.tile)) * (scale * LOG2_E)
        slots = at + plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=MATRIX)
        visible = (slots >= _to_columns(begin, logits)) & (slots < _to_columns(end, logits))
        logits = jnp.where(visible, logits, EMPTY)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.where(visible, jnp.exp2(logits - _to_columns(new_top, logits)), 0.0)
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        add = _add_interpreted if interpret else _add_product
        return new_top, total, add(acc * _to_columns(shrink, acc), weights.astype(v_smem.dtype), v_smem)

    def rows(value: float):
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), MATRIX.reduce(1))

    nothing = plgpu.layout_cast(jnp.zeros((ROWS, v_ref.shape[-1]), jnp.float32), MATRIX)
    top, total, acc = plgpu.emit_pipeline(
        attend_tile, grid=(tiles,), max_concurrent_steps=plan.stages, init_carry=(rows(EMPTY), rows(0.0), nothing),
        in_specs=[plgpu.BlockSpec((plan.tile, x.shape[-1]), lambda i: (first + i, 0), transforms=_tiled(x))
                  for x in (k_ref, v_ref)],
    )(*(_of_head(ref, row, head) for ref in (k_ref, v_ref)))
    _write(out_ref.at[row, head, split], lse_ref.at[row, head, split], out_smem, lse_smem, top, total, acc)


def _of_head(ref, row, head):
    """`[S, R]` of `[B', J, S, R]`: the stored row and head that serve this program's."""
    share, shared = (jax.lax.axis_size(name) // n for name, n in zip(("row", "head"), ref.shape[:2], strict=True))
    return ref.at[row // share, head // shared]


def _share(low, high, split, plan: _Plan):
    """First tile and number of tiles of a split: those that are valid, not those of the buffer, are shared out."""
    begin, end = low // plan.tile, pl.cdiv(high, plan.tile)
    each = jnp.maximum(pl.cdiv(end - begin, plan.splits), min(2, plan.splits))
    first = begin + split * each
    return first, jnp.clip(end - first, 0, each)


def _to_columns(x, like):
    """`[rows]` beside every column of a matrix."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def _product(a, b, shape: tuple[int, int]):
    """a @ b in float32, both in shared memory."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _add_product(acc, a, b):
    """acc + a @ b with `a` in registers."""
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(plgpu.ACC.init(acc))


def _add_interpreted(acc, a, b):
    """The same for the interpreter, whose wgmma takes no `a` in registers."""
    acc = acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    plgpu.commit_smem()  # a plain read, of which the race detector must know that it comes before TMA's next write
    return acc


def _clear_stale(v_smem, valid):
    """Zeros in the rows from `valid` on: what lies there may be NaN, which a weight of zero does not silence."""
    values = plgpu.load(v_smem, layout=MATRIX)
    rows = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX)
    v_smem[...] = jnp.where(rows < valid, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _write(out_ref, lse_ref, out_smem, lse_smem, top, total, acc) -> None:
    """Store a split's partial; rows that saw nothing get (0, `EMPTY`)."""
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    out_smem[...] = acc / _to_columns(total, acc)
    lse_smem[...] = jnp.where(empty, EMPTY, top / LOG2_E + jnp.log(total))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_ref)
    plgpu.copy_smem_to_gmem(lse_smem, lse_ref)
    plgpu.wait_smem_to_gmem(0)
