"""bfloat16 buffers on a CPU: held as their bits, widened block by block where they are read.

XLA's CPU backend has no bfloat16 operations: to write one token or to read one block it widens the buffer, all of it,
at every step. Of uint16 it writes a token in place and reads a block alone. Methods see arrays when they fill a cache;
`held.hold` then puts `Bits` in their place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Int

from lowrank_kv_jax.storage.state import write_tokens


@jax.tree_util.register_pytree_node_class
class Bits:
    """A bfloat16 buffer as uint16; stands in the place of an array `[B, J, S, R]` in a segment.

    The ops read it block by block; whatever else takes an array gets all of it, widened to bfloat16.
    """

    def __init__(self, bits: Any):
        self.bits = bits

    def tree_flatten(self):
        return (self.bits,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def ndim(self) -> int:
        return len(self.bits.shape)

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    @property
    def sharding(self):
        return self.bits.sharding

    def widened(self) -> BFloat16[jax.Array, "..."]:
        """The array, bfloat16."""
        return jax.lax.bitcast_convert_type(self.bits, jnp.bfloat16)

    __jax_array__ = widened

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.widened(), dtype)

    def astype(self, dtype: Any) -> jax.Array:
        return self.widened().astype(dtype)

    def swapaxes(self, first: int, second: int) -> jax.Array:
        return self.widened().swapaxes(first, second)

    def __getitem__(self, index: Any) -> "Bits":
        return Bits(self.bits[index])

    def moved(self, move: Any, *others: "Bits") -> "Bits":
        """By a function that moves numbers about and does not compute with them."""
        return Bits(move(self.bits, *(x.bits for x in others)))

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> BFloat16[jax.Array, "B J {size} ..."]:
        """Tokens `start` to `start + size`, bfloat16 `[B, J, size, R]`."""
        return Bits(jax.lax.dynamic_slice_in_dim(self.bits, start, size, axis=2)).widened()

    def write_block(self, start: Int[jax.Array, ""] | int, new: Float[jax.Array, "B J T R"]) -> "Bits":
        """Tokens `[B, J, T, R]` written from slot `start` on."""
        return Bits(jax.lax.dynamic_update_slice_in_dim(self.bits, bits_of(new).bits, start, axis=2))

    def write_tokens(
        self, new: Float[jax.Array, "B J T R"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "Bits":
        """As `state.write_tokens`."""
        return Bits(write_tokens(self.bits, bits_of(new).bits, start, counts))


def bits_of(x: Any) -> Bits:
    """The bits of an array, rounded to bfloat16, or of what describes one."""
    if isinstance(x, Bits):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return Bits(jax.ShapeDtypeStruct(x.shape, jnp.uint16, sharding=x.sharding))
    return Bits(jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16))
