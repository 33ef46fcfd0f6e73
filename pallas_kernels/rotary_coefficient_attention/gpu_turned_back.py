"""Queries turned back by the position at which each tile of tokens begins, as the kernel of `gpu_rebuilt_kernel` meets
them: a Pallas kernel in its Triton dialect, which XLA would make four programs of."""

import functools

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


def turned_back(
    rotary: Rotary, factor: jax.Array | None, tile: int, size: int, parts: int, interpret: bool
) -> jax.Array:
    """Float16 `[B, K, P, V, 2, M, pairs]` of P parts of a head's pairs, for each of V visits to tiles of `size` slots.

    Args:
        factor: float32 `[B or 1, K]`, what queries are multiplied by, or None.
    """
    packed, steps = rotary.packed, jnp.asarray(rotary.steps)
    (batch, heads, rows, _), pairs = packed.q.shape, steps.shape[1] // parts
    visits = -(-size // tile) + rotary.runs - 1  # runs that begin in the same tile visit it each
    gaps = gaps_of(rotary)
    told = [(x, row_spec(x, batch)) for x in (packed.begin, packed.end, *gaps)]
    factors = [] if factor is None else by_head(packed, factor[..., None])
    table = steps, pl.BlockSpec(steps.shape, lambda v, h, b: (0, 0))
    arrays, specs = zip(*told, table, *factors, *by_head(packed, packed.q), strict=True)
    shape = parts, visits, 2, rows, pairs
    return pl.pallas_call(
        functools.partial(_kernel, gaps=len(gaps), tile=tile, size=size, scaled=factor is not None),
        grid=(pl.cdiv(visits, VISITS), heads, batch),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, *shape), lambda v, h, b: (b, h, 0, 0, 0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, *shape), jnp.float16),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="turned_back",
    )(*arrays)


def _kernel(begin_ref, end_ref, *refs, gaps: int, tile: int, size: int, scaled: bool):
    told, (steps_ref, *factor_ref, q_ref, out_ref) = refs[:gaps], refs[gaps:]
    _, visits, _, rows, pairs = out_ref.shape
    run_of, _ = visits_of(Limits(begin_ref, end_ref, told, ()), tile)
    visit, half = pl.program_id(0) * VISITS + jnp.arange(VISITS), steps_ref.shape[1]
    run = run_of(visit)
    position = jnp.clip(size - tile, 0, run.tile * tile) + run.offset
    cos, sin = slot_angles(position[:, None], *(steps_ref[number, :][None] for number in range(2)))
    there, pair = jnp.broadcast_to(visit < visits, (half, VISITS)).T, jnp.arange(half)

    def write(row, carry):
        own = [q_ref[row, pl.ds(side * half, half)].astype(jnp.float32)[None] for side in range(2)]
        if scaled:
            own = [x * factor_ref[0][0] for x in own]
        for side, numbers in enumerate(turn(*own, cos, -sin)):
            place = (pair // pairs)[None], visit[:, None], side, row, (pair % pairs)[None]
            at = tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), numbers.shape) for x in place)
            plgpu.store(out_ref.at[at], numbers.astype(out_ref.dtype), mask=there)
        return carry

    jax.lax.fori_loop(0, rows, write, jnp.int32(0))
