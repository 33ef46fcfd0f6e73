"""How decode attention is cut up on a GPU: splits of the tokens, tiles, pipeline stages."""

import dataclasses

from lowrank_kv_jax.pallas_kernels.packing import power_of_two

CORES = 132  # of an H100 or H200; other GPUs get a few splits more or less than would suit them
WAVES = 2  # programs for each core
IN_FLIGHT = 32 * 1024  # bytes a program should have under way: with WAVES programs a core they hide the latency
MOST_STAGES = 6
WIDE = 700  # bytes of a token (and of its rebuilt key) from which the registers of four warps spill
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
    warps: int = 4


def decode_grid(rows: int, programs: int, size: int, token_bytes: int) -> Grid:
    """A grid for `rows` queries of each of `programs` heads over buffers of `size` tokens of `token_bytes`.

    The splits follow the buffer; a kernel shares out the *valid* tokens among them, so a short row leaves some empty.
    """
    tile = 128
    while tile > 32 and tile * token_bytes > IN_FLIGHT:
        tile //= 2
    stages = min(MOST_STAGES, 1 + -(-IN_FLIGHT // (tile * token_bytes)))
    tiles = -(-size // tile)
    splits = max(1, min(-(-tiles // LEAST_TILES), CORES * WAVES // programs))
    return Grid(power_of_two(rows, 16), tile, splits, stages, warps=8 if token_bytes > WIDE else 4)
