"""What the kernel of `gpu_rebuilt_kernel` is given of packed codes, by one launch of a Pallas kernel in its Triton
dialect: queries, turned back by the position at which each tile begins, and the basis. XLA would make eight programs.

The basis is put in the order in which codes come, and scaled so that no key is too large for a float16 number; what is
added to all keys, their mean less the middles of their steps, are more columns of it. What it is scaled by is found by
every program for itself: from factors where it is in factors, which bound it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, head_spec, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_packed import (
    SUBNORMAL,
    WINDOW,
    WINDOWS,
    columns_of,
    middles_of,
    order_of,
    power_above,
)
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Limits
from lowrank_kv_jax.pallas_kernels.packing import columns, power_of_two
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import Pairs
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rebuilt_kernel import SHARE
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_rotation import gaps_of
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.gpu_turned_back import VISITS, visits_to, write_queries
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import Rotary
from lowrank_kv_jax.storage.basis import Basis, Scaled, as_array
from lowrank_kv_jax.storage.water_filled import WidthRuns

LARGEST = 2.0**15  # of a basis: numbers of keys are 2^9 times smaller, and sum up to float16 numbers
LARGEST_MEAN = 2.0**23  # over the largest number of the basis; beyond it the basis gives way
LEAST = 2.0**-100  # of a basis, which may be zeros
LARGEST_CODE = 127  # of directions in 8 bits

PAIRS = 8  # of a program for the basis, one channel of each
PIECE = 512  # of their columns, read at once
FACTOR = "factor"  # how the names of a basis' factors begin


class ForCodes(NamedTuple):
    """All float16, P parts of a head's pairs.

    Attributes:
        queries: of V visits to tiles, or one that meets all alike, `[B, K, P, V, 2, M, pairs]`.
        basis: `[B or 1, K, P, 2, columns, pairs]`.
        added: to every key, two numbers that add up to it and zeros, `[B or 1, K, P, 2, WINDOW, pairs]`.
    """

    queries: jax.Array
    basis: jax.Array
    added: jax.Array


def for_codes(
    rotary: Rotary, basis: Basis, mean: jax.Array | None, pairs: Pairs, runs: WidthRuns, *, tile: int, size: int,
    parts: int, interpret: bool,
) -> ForCodes:
    """Of codes of `runs`, in tiles of `size` slots.

    Args:
        rotary: whose basis and mean are not read.
        basis, mean: of the keys, as the op is given them.
    """
    packed, each = rotary.packed, pairs.padded // parts
    (batch, heads, rows, _), turning = packed.q.shape, rotary.gaps is not None
    visits = visits_to(rotary, tile, size) if turning else 1
    blocks, gaps = pl.cdiv(visits, VISITS), gaps_of(rotary)
    told = [(x, row_spec(x, batch)) for x in (packed.begin, packed.end, *gaps)]
    operands = {"steps": _table(rotary.steps), "q": by_head(packed, packed.q)[0]}
    own_basis = _basis(basis, batch, heads)
    kept, own = max(len(x) for x, _ in own_basis.values()), 1
    operands |= _tables(pairs, runs) | own_basis
    if mean is not None:
        means = mean if mean.ndim == 3 else mean[None]
        own, spec = len(means), pl.BlockSpec((len(means), None, means.shape[2]), lambda v, h, b: (0, h, 0))
        operands["mean"] = means, spec
    shapes = ForCodes(
        (batch, heads, parts, visits, 2, rows, each), (kept, heads, parts, 2, columns_of(runs, *WINDOWS), each),
        (max(kept, own), heads, parts, 2, WINDOW, each))
    arrays, specs = zip(*told, *operands.values(), strict=True)
    return ForCodes(*pl.pallas_call(
        functools.partial(
            _kernel, told=len(told), names=tuple(operands), blocks=blocks, turning=turning, tile=tile, size=size,
            rows=tuple(shape[0] for shape in shapes[1:])),
        grid=(blocks + parts * 2 * each // PAIRS, heads, batch),
        in_specs=specs,
        out_specs=[_of_head(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="turned_back",
    )(*arrays))


def _of_head(shape: tuple[int, ...]) -> pl.BlockSpec:
    """What a program writes of: of its row and head all."""
    rest = (0,) * (len(shape) - 2)
    return pl.BlockSpec((None, None, *shape[2:]), lambda v, h, b: (b if shape[0] > 1 else 0, h, *rest))


def _table(x: jax.Array | np.ndarray) -> Operand:
    """What all programs read all of."""
    x = jnp.asarray(x)
    return x, pl.BlockSpec(x.shape, lambda v, h, b: (0,) * x.ndim)


def _tables(pairs: Pairs, runs: WidthRuns) -> dict[str, Operand]:
    """The channels of each pair int32 `[2, pairs]`, -1 where there is none, and of each column its component, what its
    number is multiplied by, and what its codes are above theirs."""
    order, more = order_of(runs, *WINDOWS), pairs.padded - len(pairs.first)
    channels = np.pad(np.stack([pairs.first, pairs.second]), ((0, 0), (0, more)), constant_values=-1)
    found = {"channels": channels.astype(np.int32), "component": np.asarray(order.component, np.int32),
             "scale": np.asarray(order.scale, np.float32), "middle": middles_of(runs, *WINDOWS).astype(np.float32)}
    return {name: _table(x) for name, x in found.items()}


def _basis(basis: Basis, batch: int, heads: int) -> dict[str, Operand]:
    """Directions `[B or 1, K, D, R]`, their largest number `[B or 1, K or 1, 1]`, factors `[B or 1, J, R]` and weights
    `[1, K, D]`, where there are any."""
    factors, weights = (basis.factors, basis.weights) if isinstance(basis, Scaled) else ((), None)
    numbers = basis.directions if isinstance(basis, Scaled) else as_array(basis)
    numbers = numbers if numbers.ndim == 4 else numbers[None]
    numbers = numbers.reshape(len(numbers), heads, -1, numbers.shape[-1])
    if numbers.dtype == jnp.int8:
        largest = jnp.full((1, 1, 1), LARGEST_CODE, jnp.float32)
    else:
        largest = jnp.max(jnp.abs(numbers.astype(jnp.float32)), axis=(2, 3))[..., None]
    found = {"directions": numbers, "largest": largest} | {
        f"{FACTOR}{i}": x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1]) for i, x in enumerate(factors)}
    found |= {} if weights is None else {"weights": weights.reshape(1, heads, -1)}
    return {name: (x, head_spec(x, batch, heads)) for name, x in found.items()}


def _kernel(*refs, told: int, names, blocks: int, turning: bool, tile: int, size: int, rows: tuple[int, int]):
    (begin_ref, end_ref, *gaps), given, (query_ref, *out) = refs[:told], refs[told:-3], refs[-3:]
    of, block, row = dict(zip(names, given, strict=True)), pl.program_id(0), pl.program_id(2)
    unit = _unit(of, row, by_row=rows[0] > 1)

    @pl.when(block < blocks)
    def queries():
        limits = Limits(begin_ref, end_ref, gaps, ())
        steps, factor = of["steps"] if turning else None, unit * (SUBNORMAL / SHARE)
        write_queries(limits, block, steps, factor, of["q"], query_ref, tile, size)

    @pl.when((block >= blocks) & (row < max(rows)))
    def basis():
        _write_basis(of, block - blocks, row, unit, *out, writes=row < rows[0])


def _unit(of, row, by_row: bool):
    """Float32, what keys are over, but for `SUBNORMAL`: by the row's own mean, or by those of all that share a basis."""
    largest, (dim, width) = of["largest"][0], of["directions"].shape
    factors = [ref for name, ref in of.items() if name.startswith(FACTOR)]
    if factors:
        tops = []
        for start, count in columns(width, PIECE):
            component = start + jnp.arange(count)
            tops.append(jnp.max(jnp.abs(_product(factors, component, component < width))))
        largest = largest * functools.reduce(jnp.maximum, tops)
    channel = jnp.arange(power_of_two(dim, 16))
    if "weights" in of:
        least = plgpu.load(of["weights"].at[channel], mask=channel < dim, other=np.inf).astype(jnp.float32)
        largest = largest / jnp.min(least)
    if "mean" in of:
        ref = of["mean"]

        def more(number, top):
            own = plgpu.load(ref.at[jnp.full(channel.shape, number), channel], mask=channel < dim, other=0.0)
            return jnp.maximum(top, jnp.max(jnp.abs(own.astype(jnp.float32))))

        own = by_row and ref.shape[0] > 1
        first, last = (row, row + 1) if own else (jnp.int32(0), jnp.int32(ref.shape[0]))
        largest = jnp.maximum(largest, jax.lax.fori_loop(first, last, more, jnp.float32(0)) / LARGEST_MEAN)
    return power_above(jnp.maximum(largest, LEAST)) / LARGEST


def _product(factors, component, there):
    """Float32, of what factors of columns say of components; zeros where there is none."""
    found = (plgpu.load(ref.at[component], mask=there, other=0.0).astype(jnp.float32) for ref in factors)
    return functools.reduce(jnp.multiply, found)


def _write_basis(of, number, row, unit, basis_ref, added_ref, writes):
    """Some pairs' channels on one side: their columns, and what is added."""
    parts, _, held, pairs = basis_ref.shape
    some = pairs // PAIRS
    part, side, first = number // (2 * some), number // some % 2, number % some * PAIRS
    pair = first + jnp.arange(PAIRS)
    channel = plgpu.load(of["channels"].at[jnp.full((PAIRS,), side), part * pairs + pair])
    factors = [ref for name, ref in of.items() if name.startswith(FACTOR)]
    weights = 1.0
    if "weights" in of:
        weights = plgpu.load(of["weights"].at[channel], mask=channel >= 0, other=1.0).astype(jnp.float32)[None]

    def piece(i, sums):
        column = i * PIECE + jnp.arange(PIECE)
        there = column < held
        component = plgpu.load(of["component"].at[column], mask=there, other=-1)
        scale, middle = (plgpu.load(of[name].at[column], mask=there, other=0.0) for name in ("scale", "middle"))
        scale = scale if not factors else scale * _product(factors, component, component >= 0)
        at = tuple(jnp.broadcast_to(x, (PIECE, PAIRS)) for x in (channel[None], component[:, None]))
        numbers = plgpu.load(of["directions"].at[at], mask=(at[0] >= 0) & (at[1] >= 0), other=0).astype(jnp.float32)
        numbers = (numbers / weights * (scale / unit)[:, None]).astype(basis_ref.dtype)
        place = part, side, column[:, None], pair[None]
        at = tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), numbers.shape) for x in place)
        plgpu.store(basis_ref.at[at], numbers, mask=jnp.broadcast_to(there[:, None] & writes, numbers.shape))
        return sums + jnp.sum(numbers.astype(jnp.float32) * middle[:, None], axis=0)

    sums = jax.lax.fori_loop(0, pl.cdiv(held, PIECE), piece, jnp.zeros((PAIRS,), jnp.float32))
    added = -sums / SUBNORMAL
    if "mean" in of:
        own = jnp.full((PAIRS,), row if of["mean"].shape[0] > 1 else 0)
        mean = plgpu.load(of["mean"].at[own, channel], mask=channel >= 0, other=0.0)
        added = added + mean.astype(jnp.float32) / (unit * SUBNORMAL)
    high = added.astype(added_ref.dtype)
    low = (added - high.astype(jnp.float32)).astype(added_ref.dtype)
    place = jnp.arange(WINDOW)[:, None]
    both = jnp.where(place == 0, high[None], jnp.where(place == 1, low[None], jnp.zeros_like(low)[None]))
    at = tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), both.shape) for x in (part, side, place, pair[None]))
    plgpu.store(added_ref.at[at], both)
