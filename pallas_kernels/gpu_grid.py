"""How decode attention is cut up on a GPU: splits of the tokens, tiles, pipeline stages."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.packing import power_of_two

CORES = 132  # of an H100 or H200; other GPUs get a few splits more or less than would suit them
WAVES = 2  # programs for each core
MANY_WAVES, NARROW = 4, 128  # the same where a token has at most so many bytes: on an H200 rank 32 in 81 us, not 97
IN_FLIGHT = 32 * 1024  # bytes a program should have under way: with WAVES programs a core they hide the latency
MOST_STAGES = 6
SMALL_TILE, MOST_OF_SMALL = 4096, 10  # bytes of a tile of which six stages hold too little, and the stages it may have
WIDE = 700  # bytes of a token (and of its rebuilt key) from which the registers of four warps spill
REBUILT, WIDE_REBUILT = 256, 1300  # the same where a rebuilt key has at most so many: joint rank 256 in 1026 us, not 1266
CHUNK_TILE, WIDE_CHUNK = 32, 900  # tokens of a tile, and the same bytes, of chunks: more spill registers
MOST_REBUILT = 256  # components of a key that are rebuilt where they are attended: of 512 an H200 takes as long as XLA
PACKED_ROWS = 16  # query rows that programs over packed tokens have at most: with more, warps would unpack the same
PACKED_LEAST_ROWS = 8  # of a tensor core's second operand
PACKED_TILE, PACKED_WARPS = 64, 8  # packed tokens of a tile; warps of a core, by programs of as few as can be
PACKED_SUMS = {1: 80, 2: 168, 4: 160}  # registers that sums may have, by a program's warps
PACKED_ADDED = 24  # fewer, where each slot's logits are added to: with as many some spill
REBUILT_SHAPES = ((64, 4), (128, 8))  # tokens whose packed keys are rebuilt at once, and warps
SHARED = 227 * 1024  # bytes of a core of an H100 or H200 that its programs share
LEAST_TILE = 16  # tokens that a tensor core multiplies
LEAST_TILES = 4  # a split of fewer tiles costs more to merge than it saves


@dataclasses.dataclass(frozen=True)
class Grid:
    """Static shape of a launch.

    Attributes:
        rows: query rows of a program, padded to what a tensor core takes.
        tile: tokens a program reads at once.
        splits: programs that share the tokens of a head.
        stages: of the software pipeline.
        warps: of a program.
    """

    rows: int
    tile: int
    splits: int
    stages: int
    warps: int


class Tuning(NamedTuple):
    """What launches are to have in the place of what they would choose for themselves; None: their own choice.

    Attributes:
        tile, stages, warps: as in `Grid`; stages give way where shared memory is too small.
        waves: programs for each core.
    """

    tile: int | None = None
    stages: int | None = None
    warps: int | None = None
    waves: int | None = None


_OWN_CHOICE = Tuning()
_TUNING = contextvars.ContextVar("tuning", default=_OWN_CHOICE)


@contextlib.contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Programs that are traced meanwhile have what `tuning` says: for measurements."""
    token = _TUNING.set(tuning)
    try:
        yield
    finally:
        _TUNING.reset(token)


def decode_grid(
    rows: int, programs: int, size: int, token_bytes: int, rebuilt_bytes: int = 0, widened_bytes: int = 0,
    chunks: bool = False,
) -> Grid:
    """A grid for `rows` queries of each of `programs` heads over buffers of `size` tokens.

    Args:
        token_bytes: that are read of a token.
        rebuilt_bytes: of its key, where that is rebuilt.
        widened_bytes: of a token whose codes are widened, in float32; 0 of others.
        chunks: whether programs hold what their chunk is expanded by, and where it lies, too.

    The splits follow the buffer; a kernel shares out the *valid* tokens among them, so a short row leaves some empty.
    """
    tile, wide = CHUNK_TILE if chunks else 128, token_bytes + rebuilt_bytes
    while tile > 32 and tile * wide > IN_FLIGHT:
        tile //= 2
    waves = MANY_WAVES if wide <= NARROW else WAVES
    most = (WIDE_CHUNK if chunks else WIDE_REBUILT) if 0 < rebuilt_bytes <= REBUILT else WIDE
    warps = 8 if max(wide, widened_bytes + rebuilt_bytes) > most else 4
    return _grid(rows, programs, size, tile, stages_for(tile * token_bytes), warps, waves)


def stages_for(tile_bytes: int) -> int:
    """Of a pipeline over tiles of so many bytes: `IN_FLIGHT` are under way while a program waits for its next tile."""
    most = MOST_STAGES if tile_bytes > SMALL_TILE else MOST_OF_SMALL
    return min(most, 2 + -(-IN_FLIGHT // tile_bytes))


def packed_heads(
    stored: int, q_heads: int, queries: int, columns: Callable[[int], int], added: bool = False, groups: int = 1
) -> int:
    """Heads that programs over packed tokens serve, a multiple of the `stored` ones: as few as rows and registers allow,
    since all programs of a stored head unpack the same tokens.

    Args:
        q_heads, queries: N and T.
        columns: of the values, of programs of so many warps.
        added: whether each slot's logits are added to.
        groups: in which queries lie; a program has several of them, or a part of one.

    Raises:
        Unsupported: none are few enough.
    """
    able = [heads for heads in range(stored, q_heads + 1, stored)
            if q_heads % heads == 0 and (groups % heads == 0 or heads % groups == 0)]
    few = [heads for heads in able if queries * q_heads // heads <= PACKED_ROWS]
    if not few:
        raise Unsupported(f"more than {PACKED_ROWS} query rows (queries x query heads) a kv head over packed tokens")
    fitting = (heads for heads in few if _packed_warps(queries * q_heads // heads, columns, added))
    if heads := next(fitting, 0):
        return heads
    raise Unsupported(f"packed tokens that unpack to {columns(1)} columns: registers overflow")


def _packed_warps(rows: int, columns: Callable[[int], int], added: bool) -> int | None:
    """As few as the sums of so many query rows fit into; None where they do not."""
    padded, less = power_of_two(rows, PACKED_LEAST_ROWS), added * PACKED_ADDED
    return next(
        (warps for warps, most in PACKED_SUMS.items() if columns(warps) * padded <= (most - less) * 32 * warps), None
    )


def packed_grid(
    rows: int, programs: int, size: int, columns: Callable[[int], int], token_bytes: Callable[[int], int],
    added: bool = False, given: bool = False,
) -> Grid:
    """As `decode_grid`, over packed tokens: sums of what is unpacked fill registers, whatever its bytes.

    Args:
        rows: of as many heads as `packed_heads` says.
        columns, added: as there.
        token_bytes: that are copied of a token, by programs of so many warps.
        given: whether logits are, so that half as many bytes are, and more stages take as many.
    """
    warps = _TUNING.get().warps or _packed_warps(rows, columns, added)
    assert warps is not None
    waves = max(PACKED_WARPS // warps, 1)
    each = PACKED_TILE * token_bytes(warps)
    stages = max(2, min(stages_for(each) if given else 3, SHARED // (waves * each)))
    grid = _grid(rows, programs, size, PACKED_TILE, stages, warps, waves)
    return dataclasses.replace(grid, rows=power_of_two(rows, PACKED_LEAST_ROWS))


def rebuilt_grid(rows: int, programs: int, size: int, tile: int, warps: int, together: int) -> Grid:
    """As `decode_grid`, where keys are rebuilt in a basis that each program holds, `together` programs a core."""
    grid = _grid(rows, programs, size, tile, 1, warps, together)
    return dataclasses.replace(grid, rows=power_of_two(rows, PACKED_LEAST_ROWS))


def tiled_grid(rows: int, programs: int, size: int, tile: int, token_bytes: int) -> Grid:
    """As `decode_grid`, over codes that are widened with the scales of their tiles."""
    return _grid(rows, programs, size, tile, stages_for(tile * token_bytes), 4)


def _grid(rows: int, programs: int, size: int, tile: int, stages: int, warps: int, waves: int = WAVES) -> Grid:
    """As many splits as keep every core busy, of no fewer than `LEAST_TILES`."""
    tuning = _TUNING.get()
    tile = tuning.tile or tile
    tiles, most = -(-size // tile), CORES * (tuning.waves or waves) // programs
    splits = max(1, min(-(-tiles // LEAST_TILES), most))
    return Grid(power_of_two(rows, 16), tile, splits, tuning.stages or stages, tuning.warps or warps)
