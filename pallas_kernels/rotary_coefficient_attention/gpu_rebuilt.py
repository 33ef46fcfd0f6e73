"""The op on a GPU over packed codes, or many components, that were taken before RoPE: a Pallas kernel in its Triton
dialect, whose logits go to the kernels over coefficients after RoPE.

Two kernels, because they want different programs. Coefficients meet a basis here, tokens and components being as many as
a tensor core can multiply by itself, and no more is held of a tile than its keys; there values meet a few weights, and
sums of them fill the registers. What lies between them is a float32 number for each query row and token.

Here is what the kernel of `gpu_rebuilt_kernel` is given of coefficients in 16 bits, whose keys are taken to fit into
float16 numbers, as a model in float16 takes them to; of codes `gpu_for_codes` has it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import gpu_codes, gpu_triton
from lowrank_kv_jax.pallas_kernels.dispatch import Slower
from lowrank_kv_jax.pallas_kernels.gpu_grid import rebuilt_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, of_parts, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_packed import (
    WINDOW,
    WINDOWS,
    columns_of,
)
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import rebuilt_shape
from lowrank_kv_jax.pallas_kernels.packing import Stored, columns, stored_arrays, visible_range
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import Pairs, channel_pairs
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_for_codes import for_codes
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rebuilt_kernel import PIECE, logits_kernel
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rotation import gaps_of
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_turned_back import turned_back
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import Rotary, prepare
from lowrank_kv_jax.storage.basis import Basis

LEAST_SLOTS = 256  # of logits: what the kernels behind read at once, at most


def attend(
    q, tokens, key_basis, *, rope, kv_heads, scale, q_positions, causal, window, key_mean, interpret
) -> AttnPartial:
    """As `gpu_triton.rotary_coefficient_attention`, less what follows the attended values.

    Raises:
        Unsupported: what the kernels do not read, and what does not fit into shared memory.
    """
    keys, values = stored_arrays(tokens.keys), stored_arrays(tokens.values)
    if keys.runs is not None:
        gpu_codes.check(q, keys, values)
    elif values.runs is not None or any(x.dtype.itemsize != 2 for x in (q, keys.codes, values.codes)):
        raise Slower(f"keys of {keys.codes.shape[-1]} components before RoPE, not in 16 bits: XLA rebuilds them faster")
    rotary = prepare(
        q, tokens, key_basis, rope=rope, kv_heads=kv_heads, q_positions=q_positions, causal=causal, window=window,
        key_mean=key_mean, basis_dtype=keys.codes.dtype if keys.runs is None else jnp.float32,
    )
    logits = _logits(rotary, keys, key_basis, key_mean, channel_pairs(rope, q.shape[-1]), rope, interpret)
    batch, heads, _, *rest = logits.shape
    by_query = logits.reshape(batch, heads, q.shape[1], -1, *rest).swapaxes(1, 2).reshape(*q.shape[:3], *rest)
    begin, end = visible_range(tokens, q_positions, causal, window)
    common = dict(scale=scale, interpret=interpret)
    if values.runs is None:
        return gpu_triton.attend_given(by_query, values, begin, end, dtype=q.dtype, **common)
    return gpu_codes.attend_given(by_query, values, begin, end, **common)


def _logits(
    rotary: Rotary, keys: Stored, key_basis: Basis, key_mean: jax.Array | None, channels: Pairs, rope: RopeSpec | None,
    interpret: bool,
) -> jax.Array:
    """Float32 `[B, K, M, P, S']`, P numbers that add up to each, S' the S slots or more; those of slots that no query
    sees may be anything."""
    packed, half, (size, width) = rotary.packed, rotary.basis.shape[2] // 2, keys.codes.shape[2:]
    held = sum(columns(width, PIECE)[-1]) if keys.runs is None else columns_of(keys.runs, *WINDOWS)
    pairs, tile, warps, together = rebuilt_shape(held + WINDOW, half, rotary.positions is not None)
    (batch, heads, rows, _), parts = packed.q.shape, half // pairs
    grid = rebuilt_grid(rows, batch * heads * parts, size, tile, warps, together)
    angles = _angles(rotary, rope, parts)
    if keys.runs is None:
        basis = _as_it_is(rotary, parts)
        queries = (_as_they_are(packed.q, parts) if rotary.gaps is None
                   else turned_back(rotary, grid.tile, size, parts, interpret))
    else:
        queries, *of_basis = for_codes(
            rotary, key_basis, key_mean, channels, keys.runs, tile=grid.tile, size=size, parts=parts, interpret=interpret)
        basis = [(x, _part_spec(x, batch, parts)) for x in of_basis]
    ((codes, spec),), gaps = by_head(packed, keys.codes), gaps_of(rotary)
    kernel = functools.partial(
        logits_kernel, grid=grid, gaps=len(gaps), key_runs=keys.runs, angles=len(angles), basis=len(basis),
        by_slot=rotary.positions is not None, interpret=interpret,
    )
    operands = [
        *((x, row_spec(x, batch)) for x in (packed.begin, packed.end, *gaps)), *angles,
        (queries, _part_spec(queries, batch, parts)), *basis, (codes, of_parts(spec, parts)),
    ]
    arrays, specs = zip(*operands, strict=True)
    slots = max(size, LEAST_SLOTS)
    return pl.pallas_call(
        kernel,
        grid=(grid.splits, heads * parts, batch),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, rows, None, slots), lambda s, h, b: (b, h // parts, 0, h % parts, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows, parts, slots), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name="rotary_coefficient_attention",
    )(*arrays)


def _as_it_is(rotary: Rotary, parts: int) -> list[Operand]:
    """A basis for coefficients in 16 bits, in their dtype, as it lies, `[.., 2, pairs, R]`; and if there is a mean what
    is added to every key."""
    rows, (kept, heads, _, width), first = len(rotary.packed.q), rotary.basis.shape, rotary.first or 0
    basis = rotary.basis.reshape(kept, heads, 2, parts, -1, width)
    block = None, None, 2, None, *basis.shape[4:]
    spec = pl.BlockSpec(block, lambda s, h, b: (b if kept == rows else 0, first + h // parts, 0, h % parts, 0, 0))
    return [(basis, spec), *([] if rotary.mean is None else [_as_two(rotary.mean, basis.dtype, rows, parts)])]


def _as_two(x: jax.Array, dtype: Any, rows: int, parts: int) -> Operand:
    """Of numbers `[.., 2 H]` two each in 16 bits that add up to them, and zeros: `[.., 2, WINDOW, pairs]`."""
    high = x.astype(dtype)
    both = jnp.stack([high, (x - high.astype(jnp.float32)).astype(dtype)], axis=-1)
    both = jnp.pad(both, [(0, 0)] * x.ndim + [(0, WINDOW - 2)])
    both = both.reshape(*x.shape[:2], 2, parts, -1, WINDOW).transpose(0, 1, 3, 2, 5, 4)
    return both, _part_spec(both, rows, parts)


def _as_they_are(q: jax.Array, parts: int) -> jax.Array:
    """Float16 `[B, K, P, 1, 2, M, pairs]` of queries `[B, K, M, 2 H]` that meet all tiles alike, because tokens are not
    rotated, or each by itself."""
    q = q.reshape(*q.shape[:-1], 2, parts, -1).transpose(0, 1, 4, 3, 2, 5)
    return q[:, :, :, None].astype(jnp.float16)


def _angles(rotary: Rotary, rope: RopeSpec | None, parts: int) -> list[Operand]:
    """What keys are rotated by: cos and sin of places, or positions and the pairs' steps."""
    if rope is None:
        return []

    def of_part(x: jax.Array) -> Operand:
        rows, pairs = x.shape
        return x, pl.BlockSpec((rows, pairs // parts), lambda s, h, b: (0, h % parts))

    if rotary.positions is None:
        return [of_part(table[0].astype(jnp.float16)) for table in (rotary.cos, rotary.sin)]
    ((positions, spec),) = by_head(rotary.packed, rotary.positions)
    return [(positions, of_parts(spec, parts)), of_part(rotary.steps)]


def _part_spec(x: jax.Array, rows: int, parts: int) -> pl.BlockSpec:
    """What a part of head `h` of row `b` of `rows` has of `x` `[B or 1, K, P, ..]`."""
    rest = (0,) * (x.ndim - 3)
    return pl.BlockSpec(
        (None, None, None, *x.shape[3:]),
        lambda s, h, b: (b if x.shape[0] == rows else 0, h // parts, h % parts, *rest),
    )
