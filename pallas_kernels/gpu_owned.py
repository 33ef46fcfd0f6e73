"""Ranges of slots of heads that lie behind each other on a GPU: a Pallas kernel in its Triton dialect, in the place of
three reductions of XLA's."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

TOGETHER = 1 << 14  # slots that a program reads at once: there are few programs
WARPS = 16


def ranges_of_heads(
    owner: jax.Array, lengths: jax.Array, kv_heads: int, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`owned_slots.ranges_of_heads`."""
    batch, _, size = owner.shape
    shape = jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)
    number = pl.BlockSpec((None, 1), lambda h, b: (b, h))
    return tuple(pl.pallas_call(
        functools.partial(_kernel, size=size, together=min(TOGETHER, max(128, 1 << (size - 1).bit_length()))),
        grid=(kv_heads, batch),
        in_specs=[pl.BlockSpec((1,), lambda h, b: (b,)), pl.BlockSpec((None, None, size), lambda h, b: (b, 0, 0))],
        out_specs=[number, number],
        out_shape=[shape, shape],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="ranges_of_heads",
    )(lengths, owner))


def _kernel(length_ref, owner_ref, begin_ref, end_ref, *, size: int, together: int):
    head, length = pl.program_id(0), length_ref[0]

    def read(number, found):
        slots = number * together + jnp.arange(together)
        owner = plgpu.load(owner_ref.at[slots], mask=slots < length, other=-1).astype(jnp.int32)
        mine = owner == head
        begin, end = found
        return (jnp.minimum(begin, jnp.min(jnp.where(mine, slots, size))),
                jnp.maximum(end, jnp.max(jnp.where(mine, slots + 1, 0))))

    begin_ref[0], end_ref[0] = jax.lax.fori_loop(
        0, pl.cdiv(length, together), read, (jnp.int32(size), jnp.int32(0)))
