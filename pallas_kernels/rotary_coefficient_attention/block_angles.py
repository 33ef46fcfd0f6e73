"""Rotation angles of a block of tokens, in XLA."""

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import RopeSpec, rope_angles
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.turns import slot_angles, steps_of
from lowrank_kv_jax.storage.positions import Runs


def block_angles(rope: RopeSpec, where, positions: jax.Array, start) -> tuple[jax.Array, jax.Array]:
    """cos and sin of a block's tokens, float32 `[B, 1 or J, half, S]`.

    Within runs of consecutive positions by the addition theorem, from a table of places and the angle at which the block
    begins, elsewhere in fractions of a turn: XLA's sines on a CPU take as long as all other work on a block.

    Args:
        where: the positions of the whole buffer.
        positions: those of the block's tokens, int32 `[B, 1 or J, S]`.
        start: slot at which the block begins.
    """
    frequency = _frequencies(rope)
    if not isinstance(where, Runs):
        return angles_of(rope, positions)
    size = positions.shape[-1]
    first, offset = where.pieces()
    place = frequency[:, None] * np.arange(size)
    place_cos, place_sin = (jnp.asarray(f(place), jnp.float32) for f in (np.cos, np.sin))
    base_cos, base_sin = (x[..., None] for x in rope_angles(rope, start + offset))  # [B, P + 1, half, 1]
    cos, sin = base_cos[:, 0], base_sin[:, 0]
    for run in range(1, first.shape[1]):
        behind = start + jnp.arange(size) >= first[:, run, None, None]
        cos, sin = (jnp.where(behind, base[:, run], x) for base, x in ((base_cos, cos), (base_sin, sin)))
    cos, sin = place_cos * cos - place_sin * sin, place_sin * cos + place_cos * sin
    return cos[:, None], sin[:, None]


def angles_of(rope: RopeSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of positions in any order, in fractions of a turn."""
    return slot_angles(positions[..., None, :], *(jnp.asarray(x)[:, None] for x in steps_of(_frequencies(rope))))


def _frequencies(rope: RopeSpec) -> np.ndarray:
    """Rounded as the model's own are: over thousands of tokens the difference would show."""
    return rope.inverse_frequencies().astype(np.float32).astype(np.float64)
