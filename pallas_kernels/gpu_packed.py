"""Packed codes of several widths in Triton kernels: bytes that become numbers in the registers that multiply them.

A tensor core takes float16 numbers that are too small to be normal as they are, so that the bits of a component, masked
out of their byte, are its number: c * 2^place * 2^-24, without a conversion. The power of two of its place belongs to what
multiplies it, and so does 2^-24; that components read as the *middles* of their steps is added outside, in closed form. The
bytes of a window are one operand after the other, a product for each place, and are never put in another order.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.packed_codes import Order, collected, component_of, spread
from lowrank_kv_jax.storage.water_filled import WORD, WidthRuns, bytes_of, components_of

WINDOW = 16  # bytes, the least that a tensor core sums over; wider ones meet more zeros
SUBNORMAL = 2.0**24  # an integer, over what its bits are as a float16 number


class Window(NamedTuple):
    """Bytes of a token, all of components that are equally wide; others among them meet zeros.

    Attributes:
        byte: the first one, the beginning of a word.
        size: bytes.
        bits: of a component.
        column: where their components begin in the kernel's order: first the lowest bits of all bytes.
    """

    byte: int
    size: int
    bits: int
    column: int

    def places(self) -> tuple[tuple[int, slice], ...]:
        """Masks of a byte's components, lowest first, and the columns of their product."""
        lowest, each = (1 << self.bits) - 1, 8 // self.bits
        starts = [self.column + i * self.size for i in range(each)]
        return tuple((lowest << self.bits * i, slice(at, at + self.size)) for i, at in enumerate(starts))


@functools.lru_cache
def windows_of(runs: WidthRuns, size: int) -> tuple[Window, ...]:
    """All bytes of a token in windows of `size`."""
    found, at, column = [], 0, 0
    for bits, count in runs:
        end = at + bytes_of(((bits, count),))
        for byte in range(at // WORD * WORD, end, size):
            found.append(Window(byte, size, bits, column))
            column += size * (8 // bits)
        at = end
    return tuple(found)


@functools.lru_cache
def order_of(runs: WidthRuns, size: int) -> Order:
    """The component of each column of `windows_of`."""
    component, scale = [], []
    for window in windows_of(runs, size):
        for i in range(8 // window.bits):
            byte = window.byte + np.arange(size)
            component += component_of(runs, byte, i, window.bits).tolist()
            scale += [2.0 ** -(i * window.bits)] * size
    return Order(tuple(component), tuple(scale))


def columns_of(runs: WidthRuns, size: int) -> int:
    """Columns in which a kernel has a token's numbers."""
    return len(order_of(runs, size).component)


def spread_queries(q: jax.Array, runs: WidthRuns) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What multiplies the codes of keys, of queries `[.., M, R]`.

    Returns:
        Numbers float16 `[.., M, columns]`, below 1, of 16-bit queries without a loss; what a row's products are multiplied by, float32
        `[.., M]`; and what has to be taken off them, float32 `[.., M]`: codes count from 0, keys from their middles.
    """
    q = q.astype(jnp.float32)
    power = jnp.exp2(jnp.frexp(jnp.max(jnp.abs(q), axis=-1))[1].astype(jnp.float32))
    numbers = spread(q / power[..., None], order_of(runs, WINDOW)).astype(jnp.float16)
    return numbers, SUBNORMAL * power, jnp.sum(q * jnp.asarray(_middles(runs), jnp.float32), axis=-1)


def summed_values(sums: jax.Array, runs: WidthRuns, size: int) -> jax.Array:
    """Means of the components `[.., R]` in units of their steps, of the kernel's means `[.., columns]`."""
    return SUBNORMAL * collected(sums, order_of(runs, size), runs) - jnp.asarray(_middles(runs), sums.dtype)


def _middles(runs: WidthRuns) -> np.ndarray:
    """By how much codes are above the numbers that they stand for `[R]`."""
    assert components_of(runs)
    return np.concatenate([np.full(count, 2.0 ** (bits - 1) - 0.5) for bits, count in runs])


def load_window(ref, start, tokens: int, window: Window) -> jax.Array:
    """Bytes of so many tokens of `ref` `[S, C]` from `start` on, uint8 `[tokens, size]`; zeros beyond S and C."""
    if window.byte + window.size <= ref.shape[1] and tokens <= ref.shape[0]:
        return plgpu.load(ref.at[pl.ds(start, tokens), pl.ds(window.byte, window.size)])
    at = (start + jnp.arange(tokens))[:, None], (window.byte + jnp.arange(window.size))[None]  # no slice may leave the array
    mask = at[1] < ref.shape[1]
    if tokens > ref.shape[0]:
        mask = mask & (at[0] < ref.shape[0])
    whole = (jnp.broadcast_to(x, (tokens, window.size)) for x in (*at, mask))
    return plgpu.load(ref.at[next(whole), next(whole)], mask=next(whole), other=0)


def numbers_of(codes: jax.Array, mask: int, interpret: bool) -> jax.Array:
    """Float16 numbers, some bits of each byte, of bytes of any shape.

    Four bytes of a register become two registers; Triton by itself would widen each of them alone.
    """
    if interpret:
        return jax.lax.bitcast_convert_type((codes & np.uint8(mask)).astype(jnp.uint16), jnp.float16)
    masked = f"and.b32 own, $2, {mask * 0x01010101:#x};" if mask < 255 else "mov.b32 own, $2;"
    widened = "prmt.b32 $0, own, 0, 0x4140; prmt.b32 $1, own, 0, 0x4342;"
    (numbers,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .b32 own; {masked} {widened} }}", args=[codes], constraints="=r,=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float16)],
    )
    return numbers


def with_rows(x: jax.Array, rows: int) -> jax.Array:
    """Queries `[.., M, R]` with zeros behind, `[.., rows, R]`: where columns come in a loop, rows have no mask."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, 0)])
