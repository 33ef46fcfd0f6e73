"""Chunks for GPUs: the Triton kernel of `rotary_coefficient_attention`, each chunk a row of its launch with a basis of
its own, in which keys that were coded before RoPE are rebuilt. For others queries are folded into it.

A program expands what it has attended, so that what lies between the kernels is a partial in head space of each chunk.
Another merges them, and attends to the exact tokens of the same queries. A program finds the slots of its chunk by the
owners of the pages: found by XLA they would be launches of their own.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.pallas_kernels import gpu_merge
from lowrank_kv_jax.pallas_kernels.chunked_attention import by_kernel
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.pallas_kernels.coefficient_attention import gpu_triton as coefficients
from lowrank_kv_jax.pallas_kernels.dispatch import Slower, Unsupported
from lowrank_kv_jax.pallas_kernels.expanded_values import gpu_triton as expanded
from lowrank_kv_jax.pallas_kernels.gpu_grid import MOST_REBUILT
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, launch_splits
from lowrank_kv_jax.pallas_kernels.gpu_softmax import load_block, span, write_partial
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, columns, power_of_two, stored_arrays, unpack
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rotation import gaps_of, visits_of
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_triton import Plan, attended, plan_of
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import prepare
from lowrank_kv_jax.storage.cached_tokens import Beside
from lowrank_kv_jax.storage.chunk_bases import ChunkBases

TOGETHER = 512  # pages whose owners are read at once
MOST_ROWS = 65535  # of a launch
PIECE = 64  # channels of the values that are expanded at once


def chunked_attention(
    q, tokens, owner, k_bases, v_bases, *, page, rope, kv_heads, scale, q_positions, window, interpret, beside=None
) -> AttnPartial:
    """The op of `api.chunked_attention`; `Unsupported` where the kernels do not cover a case."""
    keys, values = stored_arrays(tokens.keys), stored_arrays(tokens.values)
    (batch, queries, _, dim), chunks = q.shape, k_bases.capacity
    if keys.codes.shape[-1] > MOST_REBUILT and rope is None:
        part = by_kernel.chunked_attention(
            coefficients, q, tokens, owner, k_bases, v_bases, page=page, rope=rope, kv_heads=kv_heads, scale=scale,
            q_positions=q_positions, window=window, interpret=interpret,
        )
        return _joined(part, beside, scale, kv_heads)
    if keys.codes.shape[-1] > MOST_REBUILT:
        raise Slower(f"chunks of {keys.codes.shape[-1]} components before RoPE: XLA rebuilds them faster")
    if batch * chunks > MOST_ROWS:
        raise Unsupported(f"{batch * chunks} chunks of all rows, allowed are {MOST_ROWS}")
    rotary = prepare(
        q, tokens, _rows(k_bases.part(0, chunks, q.dtype)), rope=rope, kv_heads=kv_heads, q_positions=q_positions,
        causal=False, window=window,
    )
    rotary = rotary._replace(packed=rotary.packed._replace(parts=chunks))
    plan = plan_of(rotary, keys, values, rotate=rope is not None, chunks=True)
    operands = plan.operands | {"value_basis": _value_basis(v_bases, q.dtype, kv_heads)}
    kernel = functools.partial(
        _kernel, plan=plan._replace(operands={}), names=tuple(operands), scale=scale, page=page, chunks=chunks)
    parts = launch_splits(
        "chunked_attention", kernel, plan.grid, rotary.packed, [*gaps_of(rotary), owner], [*operands.values()], dim,
        interpret=interpret,
    )
    out, lse = (x.reshape(batch, chunks, *x.shape[1:]) for x in parts)
    if beside is not None and expanded.takes(beside.q, kv_heads):
        return expanded.merged_parts(out, lse, beside, scale=scale, interpret=interpret)
    out = out.swapaxes(1, 2).reshape(batch, kv_heads, -1, *out.shape[4:])
    lse = jnp.maximum(jnp.moveaxis(lse, 1, 3), EMPTY).reshape(*out.shape[:2], out.shape[3], -1)
    part = unpack(gpu_merge.merge_splits(out, lse, interpret=interpret), queries)
    return _joined(part, beside, scale, kv_heads)


def _joined(part: AttnPartial, beside: Beside | None, scale: float, kv_heads: int) -> AttnPartial:
    return part if beside is None else merge([attend_to(beside, scale=scale), part], kv_heads)


def _rows(x: jax.Array) -> jax.Array:
    """`[B * C, ..]` of `[B, C, ..]`."""
    return x.reshape(-1, *x.shape[2:])


def _value_basis(bases: ChunkBases, dtype, kv_heads: int) -> Operand:
    """What a head has of a chunk's basis, `[R, D]`: as it lies where it is of floats."""
    plain = bases.scales is None
    basis = _rows(bases.part(0, bases.capacity, bases.codes.dtype if plain else dtype, by_rows=True))
    shared = kv_heads // basis.shape[1]
    basis = basis.reshape(*basis.shape[:3], shared, -1)
    block = None, None, basis.shape[2], None, basis.shape[4]
    return basis, pl.BlockSpec(block, lambda s, h, b: (b, h // shared, 0, h % shared, 0))


def _kernel(limits, *refs, plan: Plan, names: tuple[str, ...], scale: float, page: int, chunks: int):
    *given, out_ref, lse_ref = refs
    of = dict(zip(names, given, strict=True))
    *gaps, owner_ref = limits.told
    limits = limits._replace(told=tuple(gaps))
    slots = _slots_of(pl.program_id(2) % chunks, owner_ref, span(limits)[1], page)
    seen = visits_of(limits, plan.grid.tile, slots)
    some, pieces = seen[1] > 0, columns(out_ref.shape[-1], PIECE)
    top, total, accs = attended(limits, of, seen, plan, scale=scale, reads=some, folds=plan.way is None)
    wide = [_expanded(accs, of["value_basis"], piece, some, of["q"].dtype == jnp.float32) for piece in pieces]
    write_partial(out_ref, lse_ref, plan.grid, wide, pieces, top, total)


def _expanded(accs, basis_ref, piece: tuple[int, int], some, exact: bool):
    """Some channels, float32 `[rows, w]`, of sums of coefficients, piece by piece of them, in a basis `[R, D]`.

    Zeros where there are not `some`: a basis that no token has may be anything, and need not be read.
    """
    precision = jax.lax.Precision.HIGHEST if exact else None
    width, found = basis_ref.shape[0], jnp.zeros((accs[0].shape[0], piece[1]), jnp.float32)
    for acc, (first, size) in zip(accs, columns(width), strict=True):
        basis = load_block(basis_ref, first, (first + jnp.arange(size) < width) & some, piece).astype(jnp.float32)
        found += jnp.dot(acc, basis, preferred_element_type=jnp.float32, precision=precision)
    return found


def _slots_of(number, owner_ref, length, page: int) -> tuple[jax.Array, jax.Array]:
    """As `by_kernel.chunk_slots`, of one chunk."""
    count = owner_ref.shape[0]
    size = min(TOGETHER, power_of_two(count, 1))

    def add(block, found):
        at = block * size + jnp.arange(size)
        held = (at < count) & (at * page < length)
        owner = plgpu.load(owner_ref.at[at], mask=held, other=jnp.iinfo(jnp.int32).max)
        return tuple(
            pages + jnp.sum((owner < last).astype(jnp.int32), dtype=jnp.int32)
            for pages, last in zip(found, (number, number + 1), strict=True))

    blocks = pl.cdiv(jnp.minimum(pl.cdiv(length, page), count), size)
    first, after = jax.lax.fori_loop(0, blocks, add, (jnp.int32(0), jnp.int32(0)))
    return page * first, page * after
