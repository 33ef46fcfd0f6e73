"""The op on a GPU over packed codes, or many components, that were taken before RoPE: a Pallas kernel in its Triton
dialect, whose logits go to the kernels over coefficients after RoPE.

Two kernels, because they want different programs. Coefficients meet a basis here, tokens and components being as many as
a tensor core can multiply by itself, and no more is held of a tile than its keys; there values meet a few weights, and
sums of them fill the registers. What lies between them is a float32 number for each query row and token.

The basis lies in shared memory for all tiles of a program. Bytes are numbers as `gpu_packed` says. Keys are rebuilt
around their mean, of codes less the middles of their steps, which is one more column of the basis. As float16 numbers,
scaled so that none is too large for one, they are rotated by their place within the tile, and meet queries that were
turned back by the position at which the tile begins; or each by its own where positions follow no order.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import gpu_codes, gpu_triton
from lowrank_kv_jax.pallas_kernels.dispatch import Slower
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid, rebuilt_grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_packed import (
    SUBNORMAL,
    WINDOW,
    columns_of,
    load_window,
    middles_of,
    ones_like,
    order_of,
    power_above,
    products,
    turned_halves,
    windows_of,
)
from lowrank_kv_jax.pallas_kernels.gpu_shared_memory import rebuilt_shape
from lowrank_kv_jax.pallas_kernels.gpu_softmax import load_block, split_range
from lowrank_kv_jax.pallas_kernels.packed_codes import spread
from lowrank_kv_jax.pallas_kernels.packing import Stored, columns, stored_arrays, visible_range
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import turn
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import Rotary, prepare, read_run, visits
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import slot_angles
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.water_filled import WidthRuns

LARGEST = 2.0**15  # of a basis: numbers of keys are 2^9 times smaller, and sum up to float16 numbers
LARGEST_MEAN = 2.0**23  # over the largest number of the basis; beyond it the basis gives way
LEAST = 2.0**-100  # of a basis, which may be zeros
UNIT_OF_FLOATS = 16.0  # of keys that coefficients in 16 bits sum up to: up to a million, down to 2^-20
PIECE = 64  # components of coefficients that are multiplied at once
MOST_TOKENS = 256  # that a program reads at once


class Scaled(NamedTuple):
    """A basis as the kernel takes it.

    Attributes:
        numbers: `[B or 1, K, P, 2, columns, H / P]`, both channels of the pairs of each of P parts, in the dtype of what
            they are multiplied with: of codes float16.
        added: `[B or 1, K, P, 2, WINDOW, H / P]`, what is added to every key: the first two numbers and zeros.
        unit: float32 `[B or 1, K]`, what the kernel's keys are multiplied by.
    """

    numbers: jax.Array
    added: jax.Array
    unit: jax.Array


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
        key_mean=key_mean, basis_dtype=jnp.float32,
    )
    logits = _logits(rotary, keys, rope, interpret)
    batch, heads, _, *rest = logits.shape
    by_query = logits.reshape(batch, heads, q.shape[1], -1, *rest).swapaxes(1, 2).reshape(*q.shape[:3], *rest)
    begin, end = visible_range(tokens, q_positions, causal, window)
    reader = gpu_triton if values.runs is None else gpu_codes
    return reader.attend_given(by_query, values, begin, end, dtype=q.dtype, scale=scale, interpret=interpret)


def _logits(rotary: Rotary, keys: Stored, rope: RopeSpec | None, interpret: bool) -> jax.Array:
    """Float32 `[B, K, M, P, S']`, P numbers that add up to each, S' the S slots or more; those of slots that no query
    sees may be anything."""
    packed, size, half = rotary.packed, keys.codes.shape[2], rotary.basis.shape[2] // 2
    codes = keys.runs is not None
    width = columns_of(keys.runs, WINDOW) if codes else sum(_pieces(keys.codes.shape[-1])[-1])
    pairs, tile, warps, together = rebuilt_shape(width + WINDOW, half)
    (batch, heads, rows, _), parts = packed.q.shape, half // pairs
    grid = rebuilt_grid(rows, batch * heads * parts, size, tile, warps, together)
    basis = _scaled(rotary, keys.runs, parts) if codes else _as_it_is(rotary, keys.codes.dtype, width, parts)
    power = power_above(jnp.max(jnp.abs(packed.q.astype(jnp.float32)), axis=-1))
    queries = _turned_back(packed.q.astype(jnp.float32) / power[..., None], rotary, rope, grid.tile, size)
    queries = queries.reshape(*queries.shape[:-1], parts, pairs)
    queries = jnp.moveaxis(queries, 5, 2).astype(jnp.float16)
    angles = _angles(rotary, rope, parts)
    factor = power * basis.unit[..., None]
    told = visits(rotary, grid.tile)
    operands = [
        (told, row_spec(told, batch)), *angles,
        *((x, _part_spec(x, batch, parts)) for x in (queries, basis.numbers, basis.added)),
        *((x, _of_heads(spec, parts)) for x, spec in by_head(packed, factor, keys.codes)),
    ]
    kernel = functools.partial(
        _kernel, grid=grid, runs=rotary.first.shape[1], key_runs=keys.runs, rotated=rope is not None,
        by_slot=rotary.positions is not None, interpret=interpret,
    )
    arrays, specs = zip(*operands, strict=True)
    slots = max(size, MOST_TOKENS)
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


def _scaled(rotary: Rotary, runs: WidthRuns, parts: int) -> Scaled:
    largest, basis, mean = rotary.basis, rotary.basis, rotary.mean
    if mean is not None:
        own = mean if len(mean) == len(basis) else jnp.max(jnp.abs(mean), axis=0, keepdims=True)
        largest = jnp.concatenate([basis, own[..., None] / LARGEST_MEAN], axis=-1)  # each reduction is a launch or two
    unit = power_above(jnp.maximum(jnp.max(jnp.abs(largest), axis=(2, 3)), LEAST)) / LARGEST
    numbers = spread(basis / unit[..., None, None], order_of(runs, WINDOW)).astype(jnp.float16)
    added = -precise.matmul(numbers.astype(jnp.float32), jnp.asarray(middles_of(runs, WINDOW), jnp.float32)) / SUBNORMAL
    added = added if mean is None else added + mean / (unit * SUBNORMAL)[..., None]
    return Scaled(_by_part(numbers, parts), _by_part(_as_two(added, numbers.dtype), parts), unit * SUBNORMAL)


def _as_it_is(rotary: Rotary, dtype: Any, width: int, parts: int) -> Scaled:
    """A basis for coefficients in 16 bits, with zeros behind its last component."""
    numbers = (rotary.basis / UNIT_OF_FLOATS).astype(dtype)
    numbers = jnp.pad(numbers, [(0, 0)] * 3 + [(0, width - numbers.shape[-1])])
    mean = jnp.zeros_like(rotary.basis[:1, :, :, 0]) if rotary.mean is None else rotary.mean
    added = _as_two(mean / UNIT_OF_FLOATS, dtype)
    unit = jnp.full(numbers.shape[:2], UNIT_OF_FLOATS)
    return Scaled(_by_part(numbers, parts), _by_part(added, parts), unit)


def _as_two(x: jax.Array, dtype: Any) -> jax.Array:
    """`[.., WINDOW]`, of whose numbers in 16 bits the first two add up to x, and the others are zeros."""
    high = x.astype(dtype)
    both = jnp.stack([high, (x - high.astype(jnp.float32)).astype(dtype)], axis=-1)
    return jnp.pad(both, [(0, 0)] * x.ndim + [(0, WINDOW - 2)])


def _by_part(x: jax.Array, parts: int) -> jax.Array:
    """`[.., K, P, 2, C, H / P]` of `[.., K, 2 H, C]`."""
    return x.reshape(*x.shape[:2], 2, parts, -1, x.shape[-1]).transpose(0, 1, 3, 2, 5, 4)


def _pieces(width: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the components of coefficients that are multiplied at once."""
    return columns(width, PIECE)


def _turned_back(q: jax.Array, rotary: Rotary, rope: RopeSpec | None, tile: int, size: int) -> jax.Array:
    """Float32 `[B, K, V, 2, M, H]` of queries `[B, K, M, 2 H]`, as each of V visits to a tile of a run meets them; one
    for all where tokens are not rotated, or each by itself."""
    q = q.reshape(*q.shape[:-1], 2, -1).swapaxes(2, 3)[:, :, None]
    if rope is None or rotary.positions is not None:
        return q
    told, runs = visits(rotary, tile), rotary.first.shape[1]
    visit = jnp.arange(-(-size // tile) + runs - 1)[None]  # runs that begin in the same tile visit it each
    run = read_run(lambda number: told[:, number, None], runs, visit)
    position = jnp.clip(size - tile, 0, run.tile * tile) + run.offset
    cos, sin = (x[:, None, :, None] for x in slot_angles(position[..., None], *rotary.steps[:, None]))
    return jnp.stack(turn(q[:, :, :, 0], q[:, :, :, 1], cos, -sin), axis=3)


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
    return [(positions, _of_heads(spec, parts)), of_part(rotary.steps)]


def _of_heads(spec: pl.BlockSpec, parts: int) -> pl.BlockSpec:
    """What all parts of a head read."""
    return pl.BlockSpec(spec.block_shape, lambda s, h, b: spec.index_map(s, h // parts, b))


def _part_spec(x: jax.Array, rows: int, parts: int) -> pl.BlockSpec:
    """What a part of head `h` of row `b` of `rows` has of `x` `[B or 1, K, P, ..]`."""
    rest = (0,) * (x.ndim - 3)
    return pl.BlockSpec(
        (None, None, None, *x.shape[3:]),
        lambda s, h, b: (b if x.shape[0] == rows else 0, h // parts, h % parts, *rest),
    )


def _kernel(
    told_ref, *refs, grid: Grid, runs: int, key_runs: WidthRuns | None, rotated: bool, by_slot: bool, interpret: bool
):
    angle_refs, (q_ref, basis_ref, added_ref, factor_ref, k_ref, out_ref) = refs[: 2 * rotated], refs[2 * rotated :]
    size, n, pairs, there = k_ref.shape[0], grid.tile, basis_ref.shape[2], factor_ref.shape[0]
    row = jnp.arange(grid.rows)
    factor = plgpu.load(factor_ref.at[row], mask=row < there, other=0)
    rotate = _by_slot(*angle_refs, n) if by_slot else _by_place(*angle_refs, n) if rotated else None

    factors = functools.partial(_floats, k_ref) if key_runs is None else functools.partial(_numbers, k_ref, key_runs)
    held = {start: _both(basis_ref, start, size) for start, size in _columns(k_ref.shape[1], key_runs)}
    added = _both(added_ref, 0, WINDOW)

    def rebuilt(at):
        halves = [jnp.zeros((n, pairs), jnp.float32)] * 2
        for column, numbers in factors(at, n, interpret):
            own = added if column is None else held[column]
            more = (jnp.dot(numbers, u, preferred_element_type=jnp.float32) for u in own)
            halves = [x + y for x, y in zip(halves, more, strict=True)]
        return [x.astype(jnp.float16) for x in halves]

    def body(visit, carry):
        run = read_run(lambda number: told_ref[number], runs, visit)
        first = run.tile * n
        at = first if size % n == 0 else jnp.clip(size - n, 0, first)  # as in `gpu_codes`
        slots = at + jnp.arange(n)
        mine = (slots >= jnp.maximum(run.low, first)) & (slots < run.high)
        keys = rebuilt(at)
        if rotate is not None:
            keys = turned_halves(*keys, *rotate(at), interpret)
        met = visit if q_ref.shape[0] > 1 else 0
        queries = [plgpu.load(q_ref.at[_whole(met, side, row, there, pairs)]) for side in range(2)]
        logits = sum(jnp.dot(k, q.T, preferred_element_type=jnp.float32) for k, q in zip(keys, queries, strict=True))
        where = tuple(jnp.broadcast_to(x, (n, grid.rows)) for x in (row[None], slots[:, None]))
        plgpu.store(out_ref.at[where], logits * factor[None], mask=mine[:, None] & (row < there)[None])
        return carry

    start, stop = split_range(told_ref[5 * runs], grid)
    jax.lax.fori_loop(start, stop, body, jnp.int32(0))


def _both(ref, start: int, size: int):
    """Some columns of both channels of a basis."""
    return [plgpu.load(ref.at[jnp.int32(side), pl.ds(start, size), :]) for side in range(2)]


def _columns(width: int, runs: WidthRuns | None) -> list[tuple[int, int]]:
    """(start, size) of those of a basis that are multiplied at once."""
    if runs is None:
        return list(_pieces(width))
    return [(product.column, WINDOW) for window in windows_of(runs, WINDOW) for product in window.products]


def _numbers(k_ref, runs: WidthRuns, at, n: int, interpret: bool) -> Iterator[tuple[int | None, jax.Array]]:
    """What a tile's keys are sums of: numbers, and the column of the basis where they begin, None for what is added."""
    windows = windows_of(runs, WINDOW)
    yield None, ones_like(load_window(k_ref, at, n, windows[0]), jnp.float16, interpret)
    for product, numbers in products(k_ref, at, n, windows, interpret):
        yield product.column, numbers


def _floats(k_ref, at, n: int, interpret: bool) -> Iterator[tuple[int | None, jax.Array]]:
    """The same of coefficients as they are."""
    there, pieces = at + jnp.arange(n) < k_ref.shape[0], _pieces(k_ref.shape[1])
    yield None, ones_like(load_block(k_ref, at, there, (0, WINDOW)), k_ref.dtype, interpret)
    for start, size in pieces:
        yield start, load_block(k_ref, at, there, (start, size))


def _whole(visit, side: int, row, there: int, pairs: int):
    """Where the queries of a visit are, of `[V, 2, M, pairs]`; rows that are not there are the last one's."""
    found = visit, side, jnp.minimum(row, there - 1)[:, None], jnp.arange(pairs)[None]
    return tuple(jnp.broadcast_to(x, (row.shape[0], pairs)) for x in found)


def _by_place(cos_ref, sin_ref, tile: int):
    """Angles of places within a tile: the same for all."""
    angles = [plgpu.load(ref.at[pl.ds(0, tile), :]) for ref in (cos_ref, sin_ref)]
    return lambda at: angles


def _by_slot(position_ref, steps_ref, tile: int):
    """Angles of the positions of a tile's slots, of those that are there."""
    steps = [steps_ref[number, :][None] for number in range(2)]

    def angles(at):
        slot = at + jnp.arange(tile)
        position = plgpu.load(position_ref.at[slot], mask=slot < position_ref.shape[0], other=0)
        return [x.astype(jnp.float16) for x in slot_angles(position[:, None], *steps)]

    return angles
