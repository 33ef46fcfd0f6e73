"""Queries turned back by the position at which each tile of tokens begins, as the kernel of `gpu_rebuilt_kernel` meets
them: a Pallas kernel in its Triton dialect, which XLA would make four programs of."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Limits
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import turn
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rotation import gaps_of, visits_of
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import Rotary
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import slot_angles

VISITS = 32  # of a program


def turned_back(rotary: Rotary, tile: int, size: int, parts: int, interpret: bool) -> jax.Array:
    """Float16 `[B, K, P, V, 2, M, pairs]` of P parts of a head's pairs, for each of V visits to tiles of `size` slots."""
    packed, steps = rotary.packed, jnp.asarray(rotary.steps)
    (batch, heads, rows, _), pairs = packed.q.shape, steps.shape[1] // parts
    gaps = gaps_of(rotary)
    told = [(x, row_spec(x, batch)) for x in (packed.begin, packed.end, *gaps)]
    table = steps, pl.BlockSpec(steps.shape, lambda v, h, b: (0, 0))
    arrays, specs = zip(*told, table, *by_head(packed, packed.q), strict=True)
    shape = parts, visits_to(rotary, tile, size), 2, rows, pairs

    def kernel(begin_ref, end_ref, *refs):
        *told, steps_ref, q_ref, out_ref = refs
        limits = Limits(begin_ref, end_ref, told, ())
        write_queries(limits, pl.program_id(0), steps_ref, None, q_ref, out_ref, tile, size)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(shape[1], VISITS), heads, batch),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, *shape), lambda v, h, b: (b, h, 0, 0, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, *shape), jnp.float16),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="turned_back",
    )(*arrays)


def visits_to(rotary: Rotary, tile: int, size: int) -> int:
    """V, the most there can be: runs that begin in the same tile visit it each."""
    return -(-size // tile) + rotary.runs - 1


def write_queries(
    limits: Limits, number, steps_ref, factor: jax.Array | None, q_ref, out_ref, tile: int, size: int
) -> None:
    """Write the queries of some visits, times `factor`.

    Args:
        number: of these `VISITS`.
        steps_ref: see `turns.steps_of`; None where they are not turned.
        q_ref: `[M, 2 H]`.
        out_ref: `[P, V, 2, M, pairs]`.
    """
    _, visits, _, rows, pairs = out_ref.shape
    visit, half = number * VISITS + jnp.arange(VISITS), q_ref.shape[1] // 2
    there, pair, back = jnp.broadcast_to(visit < visits, (half, VISITS)).T, jnp.arange(half), None
    if steps_ref is not None:
        run_of, _ = visits_of(limits, tile)
        run = run_of(visit)
        position = jnp.clip(size - tile, 0, run.tile * tile) + run.offset
        cos, sin = slot_angles(position[:, None], *(steps_ref[number, :][None] for number in range(2)))
        back = cos, -sin

    def write(row, carry):
        own = [q_ref[row, pl.ds(side * half, half)].astype(jnp.float32)[None] for side in range(2)]
        own = own if factor is None else [x * factor for x in own]
        own = [jnp.broadcast_to(x, (VISITS, half)) for x in own] if back is None else turn(*own, *back)
        for side, numbers in enumerate(own):
            place = (pair // pairs)[None], visit[:, None], side, row, (pair % pairs)[None]
            at = tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), numbers.shape) for x in place)
            plgpu.store(out_ref.at[at], numbers.astype(out_ref.dtype), mask=there)
        return carry

    jax.lax.fori_loop(0, rows, write, jnp.int32(0))
