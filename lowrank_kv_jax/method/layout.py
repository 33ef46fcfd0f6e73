"""What a method may know of the cache that it lives in."""

import dataclasses

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec


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
        mesh: devices that the cache is laid out over, with the axes "data" and "model"; None for one device.
        tokens: how coded tokens lie in memory, "rows" or "lanes" (see `storage.lanes`).
    """

    spec: AttentionSpec
    batch: int
    prompt: int
    capacity: int
    block: int
    dtype: str
    mesh: jax.sharding.Mesh | None = None
    tokens: str = "rows"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands: its index within its group, and its sliding window."""

    index: int = 0
    window: int | None = None


def tail_limit(layout: Layout, lengths: jax.Array, ends: int) -> jax.Array:
    """The limit (see `KVMethod.limit`) of a cache that holds all that comes after the prompt exactly, int32 `[B]`.

    It has `capacity - prompt` slots for them, and those of the prompt's exact `ends` that a shorter row leaves free; the
    other slots that its padding left are made for compressed tokens of a prompt.

    Args:
        lengths: int32 `[B]`, of the prompts.
        ends: sinks and recent tokens that stay exact of a prompt.
    """
    ends = min(ends, layout.prompt)
    return layout.capacity - layout.prompt + jnp.maximum(lengths, ends)
