"""How Triton kernels rotate the rebuilt keys of a tile: by runs of consecutive positions, or slot by slot.

Each way takes references to its arrays, the tokens of a tile and, where these are of chosen pages, a reference to the
pages' numbers. It gives `rotated(keys, query, at, mine, offset)`: both halves of keys `[tile, pairs]` and queries
`[rows, pairs]`, float32, such that their products are those of keys at their positions. `at` is the first slot of the
tile, `mine` bool `[tile]` those that count, `offset` their positions minus slots where they are a run.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lowrank_kv_jax.pallas_kernels.gpu_launch import Operand, by_head, row_spec
from lowrank_kv_jax.pallas_kernels.gpu_pages import rows_of_pages
from lowrank_kv_jax.pallas_kernels.gpu_softmax import Limits, span
from lowrank_kv_jax.pallas_kernels.packing import Stored
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import position_angle, turn
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import (
    Rotary,
    Run,
    read_run,
    table_of,
)
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import slot_angles


def by_run(cos_ref, sin_ref, tile: int, *_):
    """Keys by their place within the tile; the query back by the position at which the tile begins."""
    local = [table[0, :tile] for table in (cos_ref, sin_ref)]

    def rotated(keys, query, at, mine, offset):
        cos, sin = position_angle(cos_ref, sin_ref, at + offset)
        return turn(*keys, *local), turn(*query, cos, -sin)

    return rotated


def by_slot(position_ref, steps_ref, tile: int, *_):
    """Keys by the positions of their slots; the query stays as it is."""
    return _turned_keys(angles_of_slots(position_ref, steps_ref, tile))


def by_page(start_ref, jump_ref, steps_ref, tile: int, chosen_ref, page: int):
    """The same of slots of pages `chosen_ref` `[C]`, whose positions are those of `Runs`, `start_ref` and `jump_ref`."""

    def position_of(at, mine):
        slots = rows_of_pages(chosen_ref, page, at, mine)
        return slots + sum(jnp.where(slots >= start_ref[p], jump_ref[p], 0) for p in range(start_ref.shape[0]))

    return _turned_keys(_angles(position_of, steps_ref))


def _turned_keys(angles):
    def rotated(keys, query, at, mine, offset):
        return turn(*keys, *angles(at, mine)), query

    return rotated


def angles_of_slots(position_ref, steps_ref, tile: int):
    """`angles(first slot, slots that count)`: cos and sin float32 `[tile, pairs]` of their positions."""
    return _angles(lambda at, mine: plgpu.load(position_ref.at[at + jnp.arange(tile)], mask=mine, other=0), steps_ref)


def _angles(position_of, steps_ref):
    """The same of what gives the positions int32 `[tile]`."""
    steps = [steps_ref[number, :][None] for number in range(2)]
    return lambda at, mine: slot_angles(position_of(at, mine)[:, None], *steps)


def gaps_of(rotary: Rotary) -> list[jax.Array]:
    """What programs are told of a row's gaps, int32 `[B, P - 1]` each, as `launch` takes it: `visits_of` makes `Run`s of
    them, where XLA's `visits` are a launch of their own."""
    return [] if rotary.gaps is None else [rotary.gaps.start, rotary.gaps.jump]


def visits_of(limits: Limits, tile: int, within: Any = None) -> tuple[Callable[[Any], Run], jax.Array]:
    """Inside of a kernel that is told `gaps_of`, or `visits`: the `Run` and tile of a visit, and how many there are.

    Args:
        within: the first slot that counts and the one behind the last, where not all of those that are seen do.
    """
    if len(limits.told) == 1:
        (ref,) = limits.told
        read, runs = (lambda number: ref[number]), ref.shape[0] // 5
    else:
        gaps = ([ref[p] for p in range(ref.shape[0])] for ref in limits.told) if limits.told else ([], [])
        low, high = span(limits)
        low, high = (low, high) if within is None else (jnp.maximum(low, within[0]), jnp.minimum(high, within[1]))
        table = table_of(*gaps, low, high, tile)
        read, runs = table.__getitem__, len(table) // 5
    return functools.partial(read_run, read, runs), read(5 * runs)


def rotation(rotary: Rotary, rotate: bool, keys: Stored):
    """The way in which a kernel rotates, None where it does not, and the operands that it takes for it."""

    def whole(x) -> Operand:
        return x, pl.BlockSpec(x.shape, lambda s, h, b: (0,) * x.ndim)

    if not rotate:
        return None, []
    if rotary.positions is None:
        return by_run, [whole(rotary.cos), whole(rotary.sin)]
    if rotary.of_pages is not None and keys.chosen is not None:
        gaps = ((x, row_spec(x, rotary.packed.rows)) for x in (rotary.of_pages.start, rotary.of_pages.jump))
        return functools.partial(by_page, page=keys.page), [
            *gaps, whole(jnp.asarray(rotary.steps))]
    return by_slot, [*by_head(rotary.packed, rotary.positions), whole(jnp.asarray(rotary.steps))]


def turned_halves(
    first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Both halves of channel pairs rotated by an angle, all float16: two instructions for two numbers of a half."""
    if interpret:
        return first * cos - second * sin, second * cos + first * sin

    def pairs(text: str) -> jax.Array:
        (numbers,) = plgpu.elementwise_inline_asm(
            text, args=[first, second, cos, sin], constraints="=r,r,r,r,r", pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(first.shape, jnp.float16)],
        )
        return numbers

    less = "neg.f16x2 less, $2; mul.rn.f16x2 own, $1, $3; fma.rn.f16x2 $0, less, $4, own;"
    more = "mul.rn.f16x2 own, $2, $3; fma.rn.f16x2 $0, $1, $4, own;"
    return pairs(f"{{ .reg .b32 own, less; {less} }}"), pairs(f"{{ .reg .b32 own; {more} }}")
