"""Online softmax on a TPU over tokens that lie on the lanes, `[R, tokens]`: scratch in VMEM, one tile a grid step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packed_codes import collected, spread
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, Packed, power_of_two, ranges_of_rows
from lowrank_kv_jax.pallas_kernels.tpu_packed import plane_order, unpacked
from lowrank_kv_jax.storage.water_filled import WidthRuns

LANES = 128  # and the tokens that share a scale in 8 bits
TILE_BYTES = 1 << 20  # of keys and values that a grid step reads: far more than the step's own cost
LEAST_SCALED = 16 * LANES  # tokens of a tile in 8 bits: a register holds 16 rows of bfloat16 scales
OF_STEP, MOST_OF_STEP = 29 << 19, 56 << 20  # bytes of its tokens: compilers give a kernel 16 MiB, or what it asks for
MEMORY = 64 << 20  # which it then has; v5e and v6e have twice as much
WIDENED = {2: 2, 4: 18}  # bytes of a component of 8-bit keys that are rebuilt, by those of what multiplies it
TILES_IN_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))
"""For a grid of rows, heads and tiles: the tiles of a head share its scratch."""


def interpreter(interpret: bool):
    """What `pallas_call` takes: False, or the interpreter of TPU programs, which looks for races and starts with NaN."""
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if interpret else False


class Step(NamedTuple):
    """Where a grid step stands.

    Attributes:
        number: of its tile.
        size: tokens of a tile.
        slots: of its tokens, int32 `[1, size]`.
        high: slots from there on hold no token.
        read: number i of those that its row is told.
    """

    number: Any
    size: int
    slots: jax.Array
    high: Any
    read: Callable[[int], Any]


class LaneTokens(NamedTuple):
    """Tokens as arrays that a kernel reads.

    Attributes:
        data: `[B, J, R, S]`; packed ones uint8 `[B, J, C, S]`.
        scales: of 8-bit codes uint16 `[B, J, tiles, R]`, the bits of bfloat16 numbers.
        runs: widths of packed ones.
        column: as others have it, and without a meaning here.
    """

    data: jax.Array
    scales: jax.Array | None
    runs: WidthRuns | None = None
    column: int = 0

    @property
    def heads(self) -> int:
        """J."""
        return self.data.shape[1]

    @property
    def slots(self) -> int:
        """S."""
        return self.data.shape[3]

    @property
    def width(self) -> int:
        """Columns in which a kernel has a token's numbers: R of those that are not packed."""
        return self.data.shape[2] if self.runs is None else len(plane_order(self.runs).component)

    @property
    def token_bytes(self) -> int:
        """Of one head."""
        return self.data.shape[2] * self.data.dtype.itemsize

    @property
    def least(self) -> int:
        """Tokens of a grid step at the least."""
        return LANES if self.scales is None else LEAST_SCALED

    @property
    def most_bytes(self) -> int:
        """Of keys and values together that a grid step reads at the most, unless its tokens are the fewest."""
        return TILE_BYTES // 8 if self.runs else TILE_BYTES  # bytes are unpacked as int32 and float32

    def spread(self, x: jax.Array) -> jax.Array:
        """What multiplies the components `[.., R]`, as a kernel takes it."""
        return x if self.runs is None else spread(x, plane_order(self.runs))

    def collected(self, x: jax.Array) -> jax.Array:
        """Sums of the components `[.., R]` of what a kernel gives."""
        return x if self.runs is None else collected(x, plane_order(self.runs), self.runs)

    def numbers(self, rows: int) -> jax.Array:
        """What the steps of each row are told, int32 `[rows, n]`: nothing."""
        return jnp.zeros((rows, 0), jnp.int32)

    def arrays(self, tile: int) -> list[jax.Array]:
        """Those that a kernel is given for tiles of so many tokens."""
        return [self.data] if self.scales is None else [self.data, self.scales]

    def specs(self, batch: int, heads: int, tile: int, at) -> list[pl.BlockSpec]:
        """Of the `arrays`: the tile `at(i, b, table)` that serves row b and head h at step i."""
        share, shared = batch // self.data.shape[0], heads // self.heads
        rank = self.data.shape[2]

        def data(b, h, i, table):
            return b // share, h // shared, 0, at(i, b, table)

        def scales(b, h, i, table):
            return b // share, h // shared, at(i, b, table), 0

        specs = [pl.BlockSpec((None, None, rank, tile), data)]
        return specs if self.scales is None else [*specs, pl.BlockSpec((None, None, tile // LANES, rank), scales)]

    def tile(self, refs: list[Any], size: int) -> "Tile":
        """The tile of `size` tokens behind the first of a kernel's references, which are taken away."""
        return Tile(refs.pop(0), None if self.scales is None else refs.pop(0), self.runs)


def lane_tokens(tokens, name: str) -> LaneTokens:
    """The buffers behind keys or values.

    Raises:
        Unsupported: they lie in rows `[S, R]`, which XLA would copy whole into this layout at every call, or in a
            dtype or rank that the kernels do not read.
    """
    data = getattr(tokens, "on_lanes", None)
    if data is None:
        raise Unsupported(f"{name} lie as [tokens, rank]: convert the cache by with_token_layout(cache, 'lanes'), which "
                          "takes floats, packed components, and codes with a scale for a tile of tokens or of channels")
    if (runs := getattr(tokens, "runs", None)) is not None:
        return LaneTokens(data, None, runs)
    scales = getattr(tokens, "scales", None)
    if data.dtype.name not in ("float32", "bfloat16") and scales is None:
        raise Unsupported(f"{name} of dtype {data.dtype.name}, allowed are float32, bfloat16")
    if data.dtype == jnp.bfloat16 and data.shape[2] < 8:
        raise Unsupported(f"{name} of rank {data.shape[2]}: in bfloat16 at least 8")
    return LaneTokens(data, scales)


def tile_of(size: int, *stored: Any) -> int:
    """Tokens of a grid step over buffers of `size` slots, `LaneTokens` or others like them."""
    token, most = sum(x.token_bytes for x in stored), min(x.most_bytes for x in stored)
    tile = max(x.least for x in stored)
    while 2 * tile * token <= most and tile < size:
        tile *= 2
    return tile


def memory_for(tile: int, keys: Any, values: Any, rebuilt_by: int = 0) -> pltpu.CompilerParams:
    """`TILES_IN_ORDER` with memory for grid steps of `tile` tokens; more than the default only where they need it.

    Args:
        rebuilt_by: bytes of a number that multiplies rebuilt keys; 8-bit ones wait widened, a whole tile of them.

    Raises:
        Unsupported: they need more than a TPU has; its compiler would not go on.
    """
    scaled, widened = isinstance(keys, LaneTokens) and keys.scales is not None, WIDENED.get(rebuilt_by, 0)
    needed = tile * (2 * (keys.token_bytes + values.token_bytes) + (keys.width * widened if scaled else 0))
    if needed > MOST_OF_STEP:
        raise Unsupported(f"keys of {keys.width} and values of {values.width} components: {tile} tokens of them need "
                          f"{needed} bytes of a TPU's fast memory, there are {MOST_OF_STEP}")
    return TILES_IN_ORDER if needed <= OF_STEP else dataclasses.replace(TILES_IN_ORDER, vmem_limit_bytes=MEMORY)


class Tile(NamedTuple):
    """References to a tile's tokens `[R, tokens]` and their scales `[tokens / LANES, R]`, or None."""

    data: Any
    scales: Any
    runs: WidthRuns | None = None

    def at(self, step: Step) -> "Tile":
        """The tile of a step: here it does not matter which."""
        return self

    def of_tokens(self, factor: jax.Array, inside: jax.Array) -> jax.Array:
        """`[M, tokens]`: `factor` `[M, R]` times each token; anything at tokens that are not `inside` `[1, tokens]`."""
        if self.runs is not None:
            planes = unpacked(self.data, self.runs, factor.dtype)
            return functools.reduce(jnp.add, (dot(factor[:, plane.columns], own, (1, 0)) for plane, own in planes))
        if self.scales is None:
            data = self.data[...].astype(factor.dtype)
            return dot(factor, jnp.where(inside, data, jnp.zeros_like(data)), (1, 0))
        wide, dtype = factor.astype(jnp.float32), factor.dtype
        parts = [dot((wide * scale).astype(dtype), codes.astype(dtype), (1, 0)) for _, codes, scale in self._parts()]
        return jnp.concatenate(parts, axis=1)

    def add_weighted(self, acc_ref, shrink: jax.Array, weights: jax.Array, inside: jax.Array) -> None:
        """`acc = acc * shrink + weighted`, in place."""
        if self.runs is None:
            acc_ref[...] = acc_ref[...] * shrink + self.weighted(weights, inside)
            return
        for plane, own in unpacked(self.data, self.runs, weights.dtype):
            acc_ref[:, plane.columns] = acc_ref[:, plane.columns] * shrink + dot(weights, own, (1, 1))

    def weighted(self, weights: jax.Array, inside: jax.Array) -> jax.Array:
        """`[M, R]`: the tokens' sum by `weights` `[M, tokens]`, which are 0 where not `inside`."""
        if self.scales is None:
            data = self.data[...].astype(weights.dtype)
            return dot(weights, jnp.where(inside, data, jnp.zeros_like(data)), (1, 1))
        total = jnp.zeros((weights.shape[0], self.data.shape[0]), jnp.float32)
        for part, codes, scale in self._parts():
            # the scale of a part without tokens may be anything
            filled = jnp.max(inside[:, part].astype(jnp.float32), axis=1, keepdims=True) > 0
            total += dot(weights[:, part], codes.astype(weights.dtype), (1, 1)) * jnp.where(filled, scale, 0.0)
        return total

    def _parts(self):
        """Lanes, codes `[R, LANES]` and scales float32 `[1, R]` of every so many tokens as share scales."""
        scales = widened(self.scales[...])
        for i in range(self.scales.shape[0]):
            part = slice(i * LANES, (i + 1) * LANES)
            yield part, self.data[:, part], scales[i : i + 1]


def where_they_lie(arrays: list[jax.Array], interpret: bool) -> list[jax.Array]:
    """Tokens that a kernel fetches itself: the compiler may bring no whole buffer into the TPU's own memory before.

    Scales whose rows are no whole registers it lays anew first, and does that there.
    """
    def constrained(x: jax.Array) -> jax.Array:
        return x if interpret or x.shape[-1] % LANES else pltpu.with_memory_space_constraint(x, pltpu.HBM)

    return list(map(constrained, arrays))


def widened(scales: jax.Array) -> jax.Array:
    """float32 of stored scales; of an array of them XLA would make another one at every step."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 16, jnp.float32)


def padded(packed: Packed) -> Packed:
    """Query rows padded to a register's; the new ones see nothing. Slot ranges as columns `[B, M, 1]`."""
    rows = packed.q.shape[2]
    more = power_of_two(rows, 16) - rows
    begin, end = (jnp.pad(x, ((0, 0), (0, more)))[..., None] for x in ranges_of_rows(packed))
    return Packed(jnp.pad(packed.q, ((0, 0), (0, 0), (0, more), (0, 0))), begin, end, packed.span)


def partial_shape(batch: int, heads: int, rows: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Of the output and its log-sum-exp, float32."""
    return [jax.ShapeDtypeStruct((batch, heads, rows, size), jnp.float32) for size in (width, 1)]


def scratch(rows: int, width: int) -> list:
    """Running maximum and sum, a number for each row on all lanes, and the output."""
    return [pltpu.VMEM((rows, LANES), jnp.float32)] * 2 + [pltpu.VMEM((rows, width), jnp.float32)]


def start(top_ref, total_ref, acc_ref) -> None:
    """No tokens yet."""
    top_ref[...] = jnp.full_like(top_ref, EMPTY)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product in float32; operands in float32 are multiplied as such, not in one bfloat16 pass."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def add_tile(logits, visible, values: Any, inside, dtype, top_ref, total_ref, acc_ref) -> None:
    """One tile: logits and visible `[M, tokens]`, and values of which `inside` `[1, tokens]` are valid; by `dtype`."""
    logits = jnp.where(visible, logits, EMPTY)
    old = top_ref[:, :1]
    top = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(logits - top), 0.0)
    shrink = jnp.exp(old - top)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    values.add_weighted(acc_ref, shrink, weights.astype(dtype), inside)


def finish(out_ref, lse_ref, top_ref, total_ref, acc_ref) -> None:
    """Write the partial; rows that saw nothing get (0, `EMPTY`)."""
    total = total_ref[:, :1]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out_ref[...] = acc_ref[...] / total
    lse_ref[...] = jnp.where(empty, EMPTY, top_ref[:, :1] + jnp.log(total))


def slots_of(tile, size: int) -> jax.Array:
    """The slots of a tile, int32 `[1, size]`."""
    return tile * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
