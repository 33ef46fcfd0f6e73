"""Arrays that checkpoints keep apart and the decoder as one, so that one product reads them."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.models.param_info import ParamInfo


@dataclasses.dataclass(frozen=True)
class Beside:
    """Arrays of one shape, on an axis of their own before the last: the i-th, of `[in, out]`, is `[in, i, out]`.

    A leaf of the parameter table, as `ParamInfo` is. Were they below each other along `out`, a mesh that cuts it would
    have one of them on some devices and the other on the rest.

    Attributes:
        pieces: each as a checkpoint has it, of the same shape and axes.
    """

    pieces: tuple[ParamInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As the decoder uses it."""
        *lead, last = self.pieces[0].shape
        return (*lead, len(self.pieces), last)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axis of each dimension, as in `ParamInfo`; that of the pieces is never cut."""
        *lead, last = self.pieces[0].axes
        return (*lead, None, last)

    @property
    def key(self) -> str:
        """A name that no other array of the model has."""
        return " ".join(piece.key for piece in self.pieces)

    def views(self, host: np.ndarray) -> list[np.ndarray]:
        """Where its pieces lie in an array of its shape."""
        return [host[..., i, :] for i in range(len(self.pieces))]

    def joined(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """The array of its pieces."""
        return jnp.stack(pieces, axis=-2)


Leaf = ParamInfo | Beside


def beside(*maps: Mapping[str, ParamInfo]) -> dict[str, Beside]:
    """The arrays of linear maps of one input and of one size, as those of one map."""
    return {name: Beside(tuple(arrays[name] for arrays in maps)) for name in maps[0]}
