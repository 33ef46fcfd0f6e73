"""Logits of pages on a GPU: a Pallas kernel in its Triton dialect, which reads all marks once.

XLA makes a product of each kind of marks, and widens them on the way.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_softmax import dot, load_block
from lowrank_kv_jax.pallas_kernels.packing import MAX_ROWS, columns, power_of_two

DTYPES = ("float32", "bfloat16", "float16")
WIDE_ROWS, WIDE_DIM = 16, 256  # in float32, which no tensor core multiplies: more would spill registers
TILE = 64  # pages of a program: of 32K tokens in pages of 16, 8 heads have two programs for each core of an H200


def page_logits(q: jax.Array, high: Any, low: Any, *, interpret: bool) -> jax.Array:
    """As `api.page_logits`.

    Raises:
        Unsupported: more query rows than a program takes, and numbers of other dtypes.
    """
    marks = [x.widened() if hasattr(x, "widened") else x for x in (high, low) if x is not None]  # bits on a CPU
    (batch, heads, rows, dim), pages = q.shape, high.shape[2]
    if rows > MAX_ROWS:
        raise Unsupported(f"more than {MAX_ROWS} query rows (queries x query heads) a kv head")
    if odd := {x.dtype.name for x in (q, *marks)}.difference(DTYPES):
        raise Unsupported(f"queries or marks of dtype {', '.join(odd)}")
    if (dtype := jnp.result_type(q, *marks)) == jnp.float32 and (rows > WIDE_ROWS or dim > WIDE_DIM):
        raise Unsupported(f"in float32 more than {WIDE_ROWS} query rows or {WIDE_DIM} channels")

    def of_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda i, h, b: (b, h, 0, 0))

    return pl.pallas_call(
        functools.partial(_kernel, dtype=dtype),
        grid=(pl.cdiv(pages, TILE), heads, batch),
        in_specs=[of_head(rows, dim), *(of_head(pages, dim) for _ in marks)],
        out_specs=of_head(rows, pages),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows, pages), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="page_logits",
    )(q, *marks)


def _kernel(q_ref, *refs, dtype: Any):
    *mark_refs, out_ref = refs
    count, size = out_ref.shape
    row, page = jnp.arange(power_of_two(count, 16)), pl.program_id(0) * TILE + jnp.arange(TILE)
    there, inside = row < count, page < size
    logits = jnp.zeros((row.size, TILE), jnp.float32)
    for piece in columns(q_ref.shape[-1], 32 if dtype == jnp.float32 else 128):
        q = load_block(q_ref, 0, there, piece).astype(dtype)
        parts = [q] if len(mark_refs) == 1 else [jnp.maximum(q, 0), jnp.minimum(q, 0)]
        for part, ref in zip(parts, mark_refs, strict=True):
            marks = load_block(ref, pl.program_id(0) * TILE, inside, piece).astype(dtype)
            logits += dot(part, marks.T)
    at = tuple(jnp.broadcast_to(x, logits.shape) for x in (row[:, None], page[None]))
    plgpu.store(out_ref.at[at], logits, mask=there[:, None] & inside[None])
