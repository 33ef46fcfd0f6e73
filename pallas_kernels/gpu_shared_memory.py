"""What the Triton kernels need of a GPU's shared memory, foretold: a compiler that finds too little does not go on.

Read off what the compiler of sm_90 asks for, and held to it at the edge by the tests. Exact to a few KiB, never below.
"""

import dataclasses
from collections.abc import Callable

import jax

from lowrank_kv_jax.pallas_kernels.dispatch import Slower, Unsupported
from lowrank_kv_jax.pallas_kernels.gpu_grid import LEAST_TILE, REBUILT_SHAPES, Grid
from lowrank_kv_jax.pallas_kernels.packing import Stored, columns

KIB = 1024
OF_CAPABILITY = {
    "7.5": 64 * KIB, "8.0": 163 * KIB, "8.7": 163 * KIB, "9.0": 227 * KIB, "10.0": 227 * KIB, "10.3": 227 * KIB,
    "11.0": 227 * KIB,
}
"""Bytes that a program may have, by the compute capability of the GPU."""
OUT_OF_IT = ("9.0", "10.0", "10.3")
"""Those whose tensor cores multiply what lies there; others take it into registers, which a whole basis overflows."""

LEAST_STAGES = 3
OTHERS = 99 * KIB  # of the consumers' GPUs since 8.6


BETWEEN_LAYOUTS = 44  # vectors of a head that rebuilt keys and turned queries need on their way between layouts, at most
HALF, FLOAT = 2, 4  # bytes of a weight that a product takes, and of a logit
FEWEST_PACKED = 2  # stages over packed codes
OF_TOKEN = 192  # bytes that a token of packed keys takes on its way between layouts, at most
LEAST_PAIRS, MOST_PAIRS = 16, 64  # channel pairs of a program; the most whose angles it takes slot by slot
WGMMA_ROWS = 64  # from so many query rows on, products are asynchronous: their operands have one buffer more


def coefficient_grid(grid: Grid, keys: Stored, values: Stored, query_bytes: int) -> Grid:
    """The grid of `coefficient_attention`, whose queries lie beside the tiles, with as many stages as there is room for.

    Args:
        grid: of the launch.
        keys, values: what is read.
        query_bytes: of a number of the queries.

    Raises:
        Unsupported: the GPU has too little for that.
    """
    multiplied = _multiplied(grid, keys, values) if query_bytes == 2 else ()
    queries = grid.rows * (_columns(keys) + grid.tile) * query_bytes
    return _fitting(grid, keys, values, lambda some: _tiles(some, keys, values, multiplied) + queries, stages=2)


def rotary_grid(grid: Grid, keys: Stored, values: Stored, query_bytes: int, head_dim: int, by_slot: bool) -> Grid:
    """The same of `rotary_coefficient_attention`, whose key basis lies beside the tiles as a whole.

    Args:
        grid, keys, values, query_bytes: as above.
        head_dim: of the padded queries.
        by_slot: keys are rotated slot by slot, so that the queries are the same for all tiles: where products are
            asynchronous they lie there, too.

    Raises:
        Unsupported: the GPU has too little for that.
    """
    queries = grid.rows if by_slot and grid.rows >= WGMMA_ROWS else 0
    beside = head_dim * (_columns(keys) + BETWEEN_LAYOUTS + queries) * query_bytes
    # a tile of the coefficients' kernel that is smaller spills registers, and scales are of whole tiles
    last = dict(tile=LEAST_TILE) if grid.rows < WGMMA_ROWS and keys.scales is None else dict(stages=2)
    multiplied = _multiplied(grid, values)
    return _fitting(grid, keys, values, lambda some: _tiles(some, keys, values, multiplied) + beside, **last)


def packed_grid_there(grid: Grid, keys: Stored, values: Stored, token_bytes: int, query_bytes: int = 0) -> Grid:
    """The grid of a kernel over packed codes, with fewer stages where there is too little room for them.

    Its compiler decides what waits in shared memory: this is what it asks for at most.

    Args:
        grid, keys, values: as above.
        token_bytes: that are copied of a token.
        query_bytes: of the queries that come with each tile.

    Raises:
        Unsupported: the GPU has too little for that.
    """

    def needed(some: Grid) -> int:
        return some.stages * (some.tile * token_bytes + query_bytes) + some.rows * some.tile * HALF

    return _fitting(grid, keys, values, needed, least=FEWEST_PACKED)


def given_grid(grid: Grid, values: Stored, parts: int) -> Grid:
    """The grid of a kernel that reads values and float32 logits, in so many parts, with fewer stages, or tokens, where
    there is too little room for them.

    Raises:
        Unsupported: as above.
    """

    def needed(some: Grid) -> int:
        rows = some.rows * some.tile
        return some.stages * (some.tile * _token_bytes(values) + FLOAT * parts * rows) + HALF * rows

    return _fitting(grid, values, values, needed, tile=LEAST_TILE)


def rebuilt_shape(columns: int, pairs: int, by_slot: bool) -> tuple[int, int, int, int]:
    """Channel pairs, tokens, warps of a program that rebuilds packed keys, and how many programs a core holds: of as few
    tokens as let two share it, or else of many, and of all channels if their basis fits.

    Args:
        columns: of the basis as the kernel takes it.
        pairs: of a head.
        by_slot: angles are taken of each slot's position: of more pairs than `MOST_PAIRS` they would fill the registers.

    Raises:
        Unsupported: the GPU has too little for that.
        Slower: its tensor cores do not read it.
    """
    if (found := capability()) not in OUT_OF_IT:
        raise Slower(f"keys before RoPE rebuilt out of shared memory, on a GPU of compute capability {found}")
    pairs = min(pairs, MOST_PAIRS) if by_slot else pairs

    def together(own: int, tile: int) -> int:
        return there() // (HALF * columns * 2 * own + OF_TOKEN * tile)

    few, many = REBUILT_SHAPES
    for own in (pairs >> halved for halved in range(pairs.bit_length()) if pairs >> halved >= LEAST_PAIRS):
        if together(own, few[0]) > 1:
            return own, *few, together(own, few[0])
        if together(own, many[0]):
            return own, *many, 1
    raise Unsupported(f"packed keys that unpack to {columns} columns, whose basis needs more than the {there()} bytes of "
                      "shared memory that the GPU has")


def _multiplied(grid: Grid, *stored: Stored) -> tuple[Stored, ...]:
    """Those that products read where they lie; codes are widened in registers first."""
    return tuple(x for x in stored if grid.rows >= WGMMA_ROWS and x.scales is None)


def _tiles(grid: Grid, keys: Stored, values: Stored, multiplied: tuple[Stored, ...]) -> int:
    """Bytes of the tiles under way, and of another one of what is `multiplied`."""
    under_way = (grid.stages - 1) * (_token_bytes(keys) + _token_bytes(values))
    return grid.tile * (under_way + sum(map(_token_bytes, multiplied)))


def _token_bytes(stored: Stored) -> int:
    return _columns(stored) * stored.codes.dtype.itemsize


def _fitting(
    grid: Grid, keys: Stored, values: Stored, needed: Callable[[Grid], int], least: int = LEAST_STAGES, **last: int
) -> Grid:
    """Fewer stages, `least` of them: by default while one tile is under way beside that which is multiplied; then the
    `last` fields of a grid."""
    while grid.stages > least and needed(grid) > there():
        grid = dataclasses.replace(grid, stages=grid.stages - 1)
    if needed(grid) > there():
        grid = dataclasses.replace(grid, **last)
    _check(keys, values, needed(grid))
    return grid


def _check(keys: Stored, values: Stored, needed: int) -> None:
    if needed > (most := there()):
        raise Unsupported(f"keys of rank {keys.codes.shape[-1]} and values of rank {values.codes.shape[-1]} need "
                          f"{needed} bytes of shared memory, the GPU has {most}")


def _columns(stored: Stored) -> int:
    """Columns that are read of a token, those under a mask included."""
    return sum(size for _, size in columns(stored.codes.shape[-1]))


def there() -> int:
    """Bytes of the GPU at hand, of an H100 or H200 where there is none."""
    return OF_CAPABILITY.get(capability(), OTHERS)


def capability() -> str:
    """Of the GPU at hand, or of an H100 or H200."""
    return getattr(jax.devices()[0], "compute_capability", "9.0")
