"""What a method may know of the cache that it lives in."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.storage import backend
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype, floating
from lowrank_kv_jax.storage.lanes import LANES, TOKEN_LAYOUTS
from lowrank_kv_jax.storage.over_tokens import TOKENS
from lowrank_kv_jax.storage.sharding import check_mesh

DEFAULT_BLOCK = 32
"""`Layout.block` of methods that ask for no other; see `Part.default_block`."""

MANY_SLOTS = 8192
"""Of a store, from which on they are whole registers: products that a GPU sums over parts of them are padded to whole
parts, which would copy the tokens at every step."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static shape of a cache, hashable by value.

    Attributes:
        spec: the model's attention.
        batch: B, rows.
        prompt: length that the prompts are padded to; 0 for a cache that is filled by appending.
        capacity: longest sequence in tokens, the padded prompt included.
        block: tokens that may be appended between two refreshes.
        dtype: name of the dtype of the cache's floating leaves.
        mesh: devices that the cache is laid out over, with the axes "data", "model" and "tokens"; None for one device.
        tokens: how coded tokens lie in memory, "rows" or "lanes" (see `storage.lanes`).
        window: the widest sliding window of a group's layers, where `of_group` made the layout; None: one of them sees
            everything.

    Raises:
        ValueError: sizes that are no ints, below 1 (a prompt below 0) or above `MOST`; a capacity below the prompt;
            another way for tokens to lie.
        TypeError: as `floating`.
    """

    spec: AttentionSpec
    batch: int
    prompt: int
    capacity: int
    block: int
    dtype: str
    mesh: jax.sharding.Mesh | None = None
    tokens: str = "rows"
    window: int | None = None

    def __post_init__(self):
        for name, least in (("batch", 1), ("prompt", 0), ("capacity", 1), ("block", 1)):
            check_int(name, getattr(self, name), least)
        if self.capacity < self.prompt:
            raise ValueError(f"capacity={self.capacity}: the prompt has {self.prompt} tokens; capacity must be at least "
                             "that")
        floating(self.dtype)
        if self.tokens not in TOKEN_LAYOUTS:
            raise ValueError(f"tokens={self.tokens!r}: allowed are {', '.join(TOKEN_LAYOUTS)}")

    @property
    def token_devices(self) -> int:
        """Over how many devices the slots of a store are cut."""
        return 1 if self.mesh is None else self.mesh.shape.get(TOKENS, 1)

    def whole_slots(self, slots: int, unit: int = 1) -> int:
        """So many slots, and more where they are many or cut over devices, of which each has whole registers of them and
        whole units."""
        if self.token_devices == 1 and slots < MANY_SLOTS:
            return slots
        of_all = self.token_devices * math.lcm(LANES, unit)
        return -(-slots // of_all) * of_all

    def of_layer(self, layer: int) -> "Layout":
        """What one layer is laid out for; see `AttentionSpec.of_layer`."""
        return self.of_group((layer,))

    def of_group(self, layers: Sequence[int]) -> "Layout":
        """What layers that share a store are laid out for: its tokens stay for the one that sees furthest back."""
        windows = [self.spec.windows[layer] for layer in layers]
        own, window = self.spec.of_layer(layers[0]), None if None in windows else max(x for x in windows if x)
        if own is self.spec and window == self.window:
            return self
        return dataclasses.replace(self, spec=own, window=window)


def layout_of(
    spec: AttentionSpec, batch: int, prompt: int, capacity: int | None = None, block: int = DEFAULT_BLOCK,
    dtype: Any = None, mesh: jax.sharding.Mesh | None = None,
) -> Layout:
    """A `Layout` within a model's context, on a mesh that can hold it, with tokens as the platform's kernels read them.

    Args:
        capacity: the prompt and one block more where it is None.
        block: no more than the capacity is taken of it; what a method asks for is its `default_block`.
        dtype: any floating one that JAX holds, `default_cache_dtype()` where it is None.

    Raises:
        ValueError: as `Layout`; a capacity above the model's context, a mesh that cannot cut batch or heads.
        TypeError: as `Layout`.
    """
    for name, value, least in (("batch", batch, 1), ("prompt", prompt, 0), ("block", block, 1)):
        check_int(name, value, least)
    capacity = prompt + block if capacity is None else capacity
    check_int("capacity", capacity, 1)
    if capacity > spec.context:
        raise ValueError(f"capacity={capacity}: the model's context is {spec.context} tokens")
    dtype = floating(default_cache_dtype() if dtype is None else dtype).name
    tokens = "lanes" if backend.choose() == "tpu" else "rows"
    batch, prompt, capacity, block = map(int, (batch, prompt, capacity, min(block, capacity)))  # NumPy's are no JSON
    layout = Layout(spec, batch, prompt, capacity, block, dtype, tokens=tokens)
    return layout if mesh is None else dataclasses.replace(layout, mesh=check_mesh(mesh, spec, batch))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands.

    Attributes:
        index: within its group; traced where a codec says that it may be (`Codec.layers_alike`).
        window: its sliding window.
        alone: whether the state that comes with it is that of this layer alone (`GroupState.of_layer`).
    """

    index: int | jax.Array = 0
    window: int | None = None
    alone: bool = False

    @property
    def held(self) -> int:
        """Index of what the state has of this layer among what it has of each layer."""
        if self.alone:
            return 0
        assert isinstance(self.index, int)
        return self.index


def tail_limit(layout: Layout, lengths: Int[jax.Array, " B"], ends: int) -> Int[jax.Array, " B"]:
    """The limit (see `KVMethod.limit`) of a cache that holds all that comes after the prompt exactly, int32 `[B]`.

    It has `capacity - prompt` slots for them, and those of the prompt's exact `ends` that a shorter row leaves free; the
    other slots that its padding left are made for compressed tokens of a prompt.

    Args:
        lengths: int32 `[B]`, of the prompts.
        ends: sinks and recent tokens that stay exact of a prompt.
    """
    ends = min(ends, layout.prompt)
    return layout.capacity - layout.prompt + jnp.maximum(lengths, ends)
