"""How TPU kernels rotate the rebuilt keys of a tile: by runs of consecutive positions, or slot by slot.

Either way has arrays that a kernel takes, their specs (`at` gives the tile of a step), and `rotated`, which is called
within the kernel with references to them and gives both halves of keys `[H, tile]` and queries `[M, H]`, float32, such
that their products are those of keys at their positions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import channel_pairs, position_angle, turn
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.prepare import Rotary
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import slot_angles
from lowrank_kv_jax.pallas_kernels.tpu_softmax import where_they_lie

SUBLANES = 8  # rows of int32 that a register holds


class ByRun(NamedTuple):
    """Keys by their place within the tile; the query back by the position at which the tile begins.

    Attributes:
        tables: cos and sin of the places within a tile, float32 `[H, tile]`, and `digit_tables`.
    """

    tables: tuple[jax.Array, ...]

    def arrays(self, interpret: bool) -> list[jax.Array]:
        return list(self.tables)

    def specs(self, at) -> list[pl.BlockSpec]:
        return list(map(_whole, self.tables))

    def rotated(self, refs, keys, query, first):
        """`first` is the position at which the tile would begin, were all of it this run."""
        place_cos_ref, place_sin_ref, *tables = refs
        cos, sin = position_angle(*tables, first)
        return turn(*keys, place_cos_ref[...], place_sin_ref[...]), turn(*query, cos, -sin)


class BySlot(NamedTuple):
    """Keys by the positions of their slots; the query stays as it is.

    Attributes:
        positions: int32 `[B, J, S]`.
        steps: `steps_of_pairs` `[2, H, 1]`.
        heads: kv heads that share those of a stored one.
        tile: tokens of a grid step.
    """

    positions: jax.Array
    steps: jax.Array
    heads: int
    tile: int

    @property
    def together(self) -> int:
        """Stored heads that lie in one register: a step reads the positions of all of them, as they lie."""
        stored = self.positions.shape[1]
        return stored if stored % SUBLANES else SUBLANES

    def arrays(self, interpret: bool) -> list[jax.Array]:
        stored = self.positions.shape[1]
        if SUBLANES % stored and stored % SUBLANES:  # held in main memory they would be laid anew for it
            return [self.positions, self.steps]
        return [*where_they_lie([self.positions], interpret), self.steps]

    def specs(self, at) -> list[pl.BlockSpec]:
        def where(b, h, i, table):
            return b, h // (self.heads * self.together), at(i, b, table)

        return [pl.BlockSpec((None, self.together, self.tile), where), _whole(self.steps)]

    def rotated(self, refs, keys, query, first):
        position_ref, steps_ref = refs
        own = pl.program_id(1) // self.heads % self.together
        return turn(*keys, *slot_angles(position_ref[pl.ds(own, 1), :], steps_ref[0], steps_ref[1])), query


def rotation(rotary: Rotary, rope: RopeSpec | None, head_dim: int, tile: int) -> Any:
    """The way for tiles of so many tokens; None where nothing is rotated."""
    if rope is None:
        return None
    if rotary.positions is None:
        return ByRun((*_tile_angles(rope, head_dim, tile), rotary.cos, rotary.sin))
    heads = rotary.packed.q.shape[1] // rotary.positions.shape[1]
    return BySlot(rotary.positions, rotary.steps[..., None], heads, tile)


def _tile_angles(rope: RopeSpec, head_dim: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the places within a tile, each float32 `[H, tile]`, from float64."""
    pairs = channel_pairs(rope, head_dim)
    turns = np.zeros((pairs.padded, tile))
    turns[: pairs.first.size] = pairs.frequency[:, None] * np.arange(tile)
    return jnp.asarray(np.cos(turns), jnp.float32), jnp.asarray(np.sin(turns), jnp.float32)


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda b, h, i, table: (0,) * x.ndim)
