"""Packed codes of several widths in Triton kernels: bytes that become numbers in the registers that multiply them.

A tensor core takes float16 numbers that are too small to be normal as they are, so that the bits of a component, masked
out of their byte, are its number: c * 2^place * 2^-24, without a conversion. The power of two of its place belongs to
what multiplies it, and so does 2^-24; that components read as the *middles* of their steps is made good in closed form.
The bytes of a window are one operand after the other, a product for each place, and are never put in another order.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.packed_codes import NOTHING, Order, component_of, spread
from lowrank_kv_jax.storage.water_filled import WORD, WidthRuns, bytes_of, middle_of

WINDOW = 16  # bytes, the least that a tensor core sums over; wider ones meet more zeros
WINDOWS = (64, 32, WINDOW)  # where a run fills them: fewer products, each of more
SUBNORMAL = 2.0**24  # an integer, over what its bits are as a float16 number
ONES = {"float16": 0x3C003C00, "bfloat16": 0x3F803F80}  # the bits of two


class Window(NamedTuple):
    """Bytes of a token, all of components that are equally wide; others among them meet zeros, and go nowhere.

    Attributes:
        byte: the first one, the beginning of a word.
        size: bytes.
        products: a component of each byte, the lowest bits first.
    """

    byte: int
    size: int
    products: tuple["Product", ...]


class Product(NamedTuple):
    """What is multiplied at once: one component of each byte of a window.

    Attributes:
        column: where they begin in the kernel's order.
        size: columns, as many as the window has bytes.
        bits: of a component.
        place: of its lowest bit.
        first, count: those bytes of the window that have it.
        component: of the first of them.
    """

    column: int
    size: int
    bits: int
    place: int
    first: int
    count: int
    component: int

    @property
    def mask(self) -> int:
        """Its bits of a byte."""
        return (1 << self.bits) - 1 << self.place

    @property
    def scale(self) -> float:
        """What sums of `numbers_of` are multiplied by."""
        return SUBNORMAL * 2.0**-self.place

    @property
    def middle(self) -> float:
        """By how much codes are above the numbers that they stand for."""
        return middle_of(self.bits)


@functools.lru_cache
def windows_of(runs: WidthRuns, *sizes: int) -> tuple[Window, ...]:
    """All bytes of a token in windows of so many: of the most that what is left of a run fills, or else of the fewest."""
    windows, begin, column = [], 0, 0
    for bits, count in runs:
        byte, end = begin // WORD * WORD, begin + bytes_of(((bits, count),))
        while byte < end:
            size, found = next((size for size in sizes if byte + size <= end), sizes[-1]), []
            for place in range(0, 8, bits):
                own = component_of(runs, byte + np.arange(size), place // bits, bits)
                there = np.flatnonzero(own >= 0)  # side by side
                if len(there):
                    first = int(there[0])
                    found.append(Product(column, size, bits, place, first, len(there), int(own[first])))
                    column += size
            windows.append(Window(byte, size, tuple(found)))
            byte += size
        begin = end
    return tuple(windows)


def products_of(runs: WidthRuns, *sizes: int) -> tuple[Product, ...]:
    """Those of all windows."""
    return tuple(product for window in windows_of(runs, *sizes) for product in window.products)


def columns_of(runs: WidthRuns, *sizes: int) -> int:
    """Columns in which a kernel has a token's numbers."""
    return sum(product.size for product in products_of(runs, *sizes))


def read_of(runs: WidthRuns, *sizes: int) -> int:
    """Bytes that a kernel reads of a token, some twice."""
    return sum(window.size for window in windows_of(runs, *sizes))


@functools.lru_cache
def order_of(runs: WidthRuns, *sizes: int) -> Order:
    """The component of each column."""
    found = products_of(runs, *sizes)
    component = np.full(columns_of(runs, *sizes), NOTHING)
    for product in found:
        first = product.column + product.first
        component[first : first + product.count] = product.component + np.arange(product.count)
    scale = np.repeat([2.0**-product.place for product in found], [product.size for product in found])
    return Order(tuple(component.tolist()), tuple(scale.tolist()))


@functools.lru_cache
def middles_of(runs: WidthRuns, *sizes: int) -> np.ndarray:
    """By how much the code of each column is above its number, over the scale that `order_of` gives it: float64
    `[columns]`."""
    above = np.zeros(columns_of(runs, *sizes))
    for product in products_of(runs, *sizes):
        first = product.column + product.first
        above[first : first + product.count] = product.middle * 2.0**product.place
    return above


def spread_queries(q: jax.Array, runs: WidthRuns) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What multiplies the codes of keys, of queries `[.., R]`.

    Returns:
        Numbers float16 `[.., columns]` below 1, of 16-bit queries without a loss: over the `power_above` of the next. And
        float32 `[..]`: of each query the largest number, and what has to be taken off its products, because codes count
        from 0 and keys from their middles.
    """
    q = q.astype(jnp.float32)
    middles = np.concatenate([np.full(count, middle_of(bits)) for bits, count in runs])
    start = np.float32(0), np.float32(0)

    def both(sums, more):  # in one program
        return jnp.maximum(sums[0], more[0]), sums[1] + more[1]

    largest, above = jax.lax.reduce((jnp.abs(q), q * jnp.asarray(middles, q.dtype)), start, both, (q.ndim - 1,))
    return spread(q / power_above(largest)[..., None], order_of(runs, WINDOW)).astype(jnp.float16), largest, above


def power_above(x: jax.Array) -> jax.Array:
    """The power of two that is above each number, none of which is negative, by its bits; within kernels, too."""
    exponent = jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7F800000)
    return jax.lax.bitcast_convert_type(exponent + np.int32(1 << 23), jnp.float32)


def load_window(ref, start, tokens: int, window: Window) -> jax.Array:
    """Bytes of so many tokens of `ref` `[S, C]` from `start` on, uint8 `[tokens, size]`; zeros beyond S and C."""
    if window.byte + window.size <= ref.shape[1] and tokens <= ref.shape[0]:
        return plgpu.load(ref.at[pl.ds(start, tokens), pl.ds(window.byte, window.size)])
    # a slice that is known to leave the array is refused
    at = (start + jnp.arange(tokens))[:, None], (window.byte + jnp.arange(window.size))[None]
    mask = at[1] < ref.shape[1]
    if tokens > ref.shape[0]:
        mask = mask & (at[0] < ref.shape[0])
    whole = (jnp.broadcast_to(x, (tokens, window.size)) for x in (*at, mask))
    return plgpu.load(ref.at[next(whole), next(whole)], mask=next(whole), other=0)


def products(
    ref, start, tokens: int, windows: Sequence[Window], interpret: bool
) -> Iterator[tuple[Product, jax.Array]]:
    """Each product of so many tokens of `ref` `[S, C]` from `start` on, and its numbers `[tokens, bytes]`."""
    for window in windows:
        codes = load_window(ref, start, tokens, window)
        for product in window.products:
            yield product, numbers_of(codes, product.mask, interpret)


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


def ones_like(x: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """Ones in 16 bits, of the shape of codes or of numbers in 16 bits.

    As if they were made of them: what is multiplied by a constant would be held in registers from tile to tile.
    """
    if interpret:
        return jnp.ones(x.shape, dtype)
    bits, registers = ONES[jnp.dtype(dtype).name], 2 // x.dtype.itemsize
    (ones,) = plgpu.elementwise_inline_asm(
        " ".join(f"mov.b32 ${number}, {bits:#x};" for number in range(registers)), args=[x], pack=2 * registers,
        constraints=",".join(["=r"] * registers + ["r"]), result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return ones
