"""The merge of splits' partials on a GPU: a Pallas kernel in its Triton dialect, whose outputs and log-sum-exps XLA would
merge by a program each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, power_of_two

COLUMNS = 128  # of a program
TOGETHER = 32  # splits that are read at once


def merge_splits(out: jax.Array, lse: jax.Array, *, interpret: bool) -> AttnPartial:
    """`packing.merge_splits`: out `[B, H, splits, M, D]`, lse `[B, H, M, splits]`."""
    batch, heads, splits, rows, width = out.shape
    if splits == 1:
        return AttnPartial(out[:, :, 0], lse[..., 0])
    size = min(COLUMNS, power_of_two(width, 16))
    merged = pl.pallas_call(
        _kernel,
        grid=(pl.cdiv(width, size), rows, batch * heads),
        in_specs=[
            pl.BlockSpec((None, splits, None, width), lambda c, m, b: (b, 0, m, 0)),
            pl.BlockSpec((None, None, splits), lambda c, m, b: (b, m, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, width), lambda c, m, b: (b, m, 0)),
            pl.BlockSpec((None, 1), lambda c, m, b: (b, m)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch * heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((batch * heads, rows), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="merge_splits",
    )(out.reshape(-1, *out.shape[2:]), lse.reshape(-1, *lse.shape[2:]))
    return AttnPartial(*(x.reshape(batch, heads, *x.shape[1:]) for x in merged))


def _kernel(out_ref, lse_ref, merged_ref, total_ref):
    splits, width = out_ref.shape
    size = min(COLUMNS, power_of_two(width, 16))
    column = pl.program_id(0) * size + jnp.arange(size)
    split = jnp.arange(power_of_two(splits, TOGETHER))
    every = plgpu.load(lse_ref.at[split], mask=split < splits, other=EMPTY)
    top = jnp.max(every)
    total = jnp.sum(jnp.exp(every - top))  # of splits that are all empty their number: they merge to zeros

    def add(number, sums):
        own = number * TOGETHER + jnp.arange(TOGETHER)
        there = own < splits
        weight = jnp.exp(plgpu.load(lse_ref.at[own], mask=there, other=EMPTY) - top)
        at = tuple(jnp.broadcast_to(x, (TOGETHER, size)) for x in (own[:, None], column[None]))
        values = plgpu.load(out_ref.at[at], mask=there[:, None] & (column < width)[None], other=0.0)
        return sums + jnp.sum(jnp.where(there, weight, 0.0)[:, None] * values, axis=0)

    sums = jax.lax.fori_loop(0, pl.cdiv(splits, TOGETHER), add, jnp.zeros((size,), jnp.float32))
    plgpu.store(merged_ref.at[column], sums / total, mask=column < width)
    total_ref[0] = jnp.where(top <= EMPTY / 2, -jnp.inf, top + jnp.log(total))
