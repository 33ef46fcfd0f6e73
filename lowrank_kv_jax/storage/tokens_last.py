"""Packed codes on a CPU: held with the tokens last, so that what unpacks them goes through memory in order.

A token has few bytes of each width, fewer than a register holds. Of rows of bytes XLA's CPU backend unpacks a token at a
time; of columns, in which a byte of all tokens lies side by side, whole registers, and the products of a few queries
take what comes out as it lies. Methods see arrays when they fill a cache; `held.hold` then puts `TokensLast` in their
place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt8

from lowrank_kv_jax.storage.state import write_tokens


@jax.tree_util.register_pytree_node_class
class TokensLast:
    """A buffer as uint8 `[B, J, C, S]`; stands in the place of an array `[B, J, S, C]` in packed storage."""

    def __init__(self, columns: Any):
        self.columns = columns

    def tree_flatten(self):
        return (self.columns,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, width, size = self.columns.shape
        return (*lead, size, width)

    @property
    def ndim(self) -> int:
        return len(self.columns.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.columns.dtype

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes

    @property
    def sharding(self):
        return self.columns.sharding

    def widened(self) -> UInt8[jax.Array, "B J S C"]:
        """The array."""
        return self.columns.swapaxes(-1, -2)

    __jax_array__ = widened

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.columns, dtype).swapaxes(-1, -2)

    def moved(self, move: Any, *others: "TokensLast") -> "TokensLast":
        """By a function that moves rows of the batch and heads about, and does not look at tokens."""
        return TokensLast(move(self.columns, *(x.columns for x in others)))

    def block(self, start: Int[jax.Array, ""] | int, size: int) -> UInt8[jax.Array, "B J C {size}"]:
        """Tokens `start` to `start + size`, as they lie."""
        return jax.lax.dynamic_slice_in_dim(self.columns, start, size, axis=3)

    def write_block(self, start: Int[jax.Array, ""] | int, new: UInt8[jax.Array, "B J T C"]) -> "TokensLast":
        """Tokens `[B, J, T, C]` written from slot `start` on."""
        return TokensLast(jax.lax.dynamic_update_slice_in_dim(self.columns, new.swapaxes(2, 3), start, axis=3))

    def write_tokens(
        self, new: UInt8[jax.Array, "B J T C"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "TokensLast":
        """As `state.write_tokens`."""
        return TokensLast(write_tokens(self.columns, new.swapaxes(2, 3), start, counts, token_axis=3))


def tokens_last_of(x: Any) -> TokensLast:
    """An array `[B, J, S, C]`, or what describes one, with its tokens last."""
    if isinstance(x, TokensLast):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        *lead, size, width = x.shape
        return TokensLast(jax.ShapeDtypeStruct((*lead, width, size), x.dtype, sharding=x.sharding))
    return TokensLast(jnp.swapaxes(x, -1, -2))
