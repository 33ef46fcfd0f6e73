"""Directions of a basis in few bits: in 8 those whose coefficients are precise, in 4 those whose coefficients are coarse.

What a direction errs by is multiplied by its coefficient. One that is itself read in 2 bits errs by a tenth of its
variance, in one bit by a third; directions in 4 bits add one or two hundredths, and are half as many bytes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int8

PRECISE = 4
"""Bits of a coefficient from which on its direction has 8."""

UNITS = np.geomspace(0.2, 0.8, 15)
"""What is tried as the unit of 4 bits, over the root mean square of what it counts."""


class HeldDirections(NamedTuple):
    """Directions `[J, W, R]`, NumPy's or JAX's arrays, or floats as they are (`fine` alone).

    Attributes:
        fine: int8 `[J, W, P]`, the first of them; all of them where they are floats.
        coarse: the others, two columns a byte, int8 `[J, W, C]`: column i of n has the low half of byte i, or the high
            half of byte i - C, C = ceil(n / 2). None where there are none.
        unit: of all columns for each of G stretches of the width `[J, G, R]`: what `widened` makes of both is times that.
    """

    fine: Any
    coarse: Any
    unit: Any

    def of_layer(self, layers: int, layer: int | jax.Array) -> "HeldDirections":
        """Of one of so many layers, which share the width, before they are widened."""
        return jax.tree.map(lambda x: x.reshape(x.shape[0], layers, x.shape[1] // layers, x.shape[2])[:, layer], self)

    def first(self, count: int) -> tuple[jax.Array, jax.Array | None]:
        """So many columns `[J, W, count]`: int8 and their units `[J, G, count]`, or floats and None."""
        if self.unit is None:  # in a training
            return self.fine[..., :count], None
        return widened(self.fine, self.coarse, count), self.unit[..., :count]


def in_few_bits(basis: np.ndarray, parts: int, precise: int) -> HeldDirections:
    """Float `[J, W, R]` in codes whose unit each column has for each of `parts` stretches of the width.

    Args:
        precise: columns, the first ones, that have 8 bits.

    Returns:
        NumPy's arrays, units in float64.
    """
    split = basis.reshape(basis.shape[0], parts, -1, basis.shape[-1])
    fine, coarse = split[..., :precise], split[..., precise:]
    units = [np.abs(fine).max(2) / 127, _units_of_4_bits(coarse)]
    fine, coarse = (np.floor(x / np.where(unit > 0, unit, 1.0)[:, :, None] + half).reshape(*basis.shape[:2], -1)
                    for x, unit, half in zip((fine, coarse), units, (0.5, 0.0), strict=True))
    coarse = np.clip(coarse, -8, 7).astype(np.int8)
    coarse = np.pad(coarse, ((0, 0), (0, 0), (0, coarse.shape[-1] % 2)))
    low, high = np.split(coarse, 2, axis=-1)
    packed = low & np.int8(15) | high << np.int8(4)
    return HeldDirections(
        fine.astype(np.int8), packed if packed.size else None, np.concatenate([units[0], units[1] / 2], axis=-1))


def _units_of_4_bits(x: np.ndarray) -> np.ndarray:
    """`[J, parts, R]` of `[J, parts, W / parts, R]`: those that err least, each, of codes that read as their middles."""
    size = np.sqrt(np.mean(np.square(x), axis=2))
    best, units = np.full(size.shape, np.inf), np.zeros(size.shape)
    for share in UNITS:
        unit = np.where(size > 0, share * size, 1.0)[:, :, None]
        codes = np.clip(np.floor(x / unit), -8, 7) + 0.5
        error = np.sum(np.square(codes * unit - x), axis=2)
        best, units = np.minimum(best, error), np.where(error < best, share * size, units)
    return units


def widened(
    fine: Int8[jax.Array, "J W P"], coarse: Int8[jax.Array, "J W C"] | None, count: int
) -> Int8[jax.Array, "J W {count}"]:
    """The first `count` columns as whole numbers in int8: codes of 8 bits, and twice the middles of those of 4."""
    if coarse is None or count <= fine.shape[-1]:
        return fine[..., :count]
    low = jax.lax.shift_right_arithmetic(coarse << np.int8(4), np.int8(4))
    high = jax.lax.shift_right_arithmetic(coarse, np.int8(4))
    middles = (2 * x + jnp.int8(1) for x in (low, high))
    return jnp.concatenate([fine, *middles], axis=-1)[..., :count]
