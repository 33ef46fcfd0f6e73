"""Tokens in the memory of the host: read page by page, each brought to the device on its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lowrank_kv_jax.storage.bits import Bits
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.state import write_tokens

PLACES = ("device", "host")
MEMORY = "pinned_host"
"""What JAX calls the memory of the host that a device copies from."""

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@jax.tree_util.register_pytree_node_class
class OnHost:
    """A buffer of tokens that is written once; stands in the place of an array `[B, J, S, R]` in a segment.

    Inside of `jit` its type says where it lies, so that a step which takes it from the host gives it back there. It is
    read by dynamic slices alone, which compilers turn into copies from host to device. On a CPU both are one memory.
    """

    def __init__(self, held: Any):
        self.held = held

    def tree_flatten(self):
        return (self.held,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def ndim(self) -> int:
        return len(self.held.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.held.dtype

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def sharding(self):
        return self.held.sharding

    def widened(self) -> jax.Array:
        """All of it, on the device."""
        whole = _put(self.held, _DEVICE)
        return whole.widened() if isinstance(whole, Bits) else whole

    __jax_array__ = widened

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.held, dtype)

    def moved(self, move: Any, *others: "OnHost") -> "OnHost":
        """By a function of arrays on the device, and back."""
        here, *rest = (_put(x.held, _DEVICE) for x in (self, *others))
        return on_host(here.moved(move, *rest) if isinstance(here, Bits) else move(here, *rest))

    def filled(self, x: Float[jax.Array, "B J T R"]) -> "OnHost":
        """With `x` `[B, J, T, R]` in its first T slots, T <= S, and zeros behind it."""
        behind = self.shape[2] - x.shape[2]
        return on_host(jnp.pad(narrow(x, self.dtype), ((0, 0), (0, 0), (0, behind), (0, 0))))

    def write_tokens(
        self, new: Float[jax.Array, "B J T R"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> "OnHost":
        """As `state.write_tokens`; all of it comes to the device and goes back."""
        whole = _put(self.held, _DEVICE)
        return on_host(write_tokens(whole, new, start, counts))

    def read_block(self, start: Int[jax.Array, ""] | int, size: int) -> Float[jax.Array, "B J {size} R"]:
        """Tokens `start` to `start + size` on the device, `[B, J, size, R]`."""
        return self._device(jax.lax.dynamic_slice_in_dim(self._stored, start, size, axis=2))

    def read_blocks(self, starts: Int[jax.Array, "B J C"], size: int) -> Float[jax.Array, "B J C {size} R"]:
        """Blocks of `size` tokens from `starts` `[B, J, C]` on, on the device: `[B, J, C, size, R]`."""
        batch, heads, slots, width = self.shape
        rows = self._stored.reshape(-1, width)  # a TPU copies slices of one axis alone
        starts = starts + (jnp.arange(batch)[:, None, None] * heads + jnp.arange(heads)[:, None]) * slots
        read = jax.lax.map(lambda at: self._device(jax.lax.dynamic_slice_in_dim(rows, at, size)), starts.ravel())
        return read.reshape(*starts.shape, size, width)

    @property
    def _stored(self) -> jax.Array:
        return self.held.bits if isinstance(self.held, Bits) else self.held

    def _device(self, part: jax.Array) -> jax.Array:
        """A part of what is stored, as numbers on the device."""
        part = _put(part, _DEVICE)
        return Bits(part).widened() if isinstance(self.held, Bits) else part


def on_host(x: Any) -> OnHost:
    """An array, or what describes one, in the memory of the host."""
    return OnHost(_put(x, _HOST))


def has_host_memory() -> bool:
    """Whether the platform's devices can copy from a memory of the host."""
    return MEMORY in {memory.kind for memory in jax.local_devices()[0].addressable_memories()}


def _put(tree: Any, space: Any) -> Any:
    """Arrays moved; shapes stay as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if isinstance(x, jax.Array | np.ndarray) else x, tree)
