"""Which tokens a cache holds and how, read from the positions that its parts carry; on the host."""

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int8

from lowrank_kv_jax.method.accounting import state_bytes
from lowrank_kv_jax.method.cache import Cache, check_cache
from lowrank_kv_jax.storage.sharding import to_host
from lowrank_kv_jax.storage.state import states, walk


class Held(enum.IntEnum):
    """How a token is held: not at all (dropped, or summed up in a summary), as a code, or exactly."""

    GONE = 0
    CODED = 1
    EXACT = 2


def held_tokens(cache: Cache, row: int = 0) -> Int8[np.ndarray, "L K T"]:
    """How each kv head of each layer holds each token that a row has seen.

    Read from public state alone: a segment is a state with `positions` and `length`, and its tokens are exact where all
    of its own arrays of tokens are.

    Returns:
        int8 `[L, K, T]` of `Held`, T the row's length.

    Raises:
        ValueError: a row that the cache does not have.
    """
    check_cache(cache)
    spec, batch = cache.layout.spec, cache.layout.batch
    if not 0 <= row < batch:
        raise ValueError(f"row={row}: must lie in 0..{batch - 1}")
    tokens = int(to_host(cache.length)[row])
    held = np.zeros((spec.num_layers, spec.kv_heads, tokens), np.int8)
    for layers, group in zip(cache.method.layer_groups(spec), cache.groups, strict=True):
        for layer, end in zip(layers, group.ends, strict=True):
            _mark(held, (layer,), end, row)
        _mark(held, layers, group.store, row)
    return held


def layer_bytes(cache: Cache) -> tuple[int, ...]:
    """Bytes of each layer's state, its free slots included; layers that share a store have equal shares of it."""
    check_cache(cache)
    of_layers = [0] * cache.layout.spec.num_layers
    for layers, group in zip(cache.method.layer_groups(cache.layout.spec), cache.groups, strict=True):
        total = state_bytes(group)
        for index, layer in enumerate(layers):
            of_layers[layer] = total // len(layers) + (index < total % len(layers))
    return tuple(of_layers)


def _mark(held: np.ndarray, layers: Sequence[int], tree: Any, row: int) -> None:
    """Raise `held` `[L, K, T]` of these layers to what the segments of `tree` hold of each token."""
    for segment in _segments(tree):
        how = Held.EXACT if _is_exact(segment) else Held.CODED
        for head, positions in enumerate(_positions(segment, row, held.shape[1])):
            at = np.asarray(layers)[:, None], head, positions[None]
            held[at] = np.maximum(held[at], how)


def _segments(tree: Any) -> Iterator[Any]:
    return (one for _, one in states((tree,)) if _is_segment(one))


def _is_segment(one: Any) -> bool:
    return hasattr(one, "positions") and hasattr(one, "length")


def _is_exact(segment: Any) -> bool:
    """Of its own tokens: segments inside of it speak for themselves."""
    inner = tuple(f"{path}." for path, one in states(segment) if _is_segment(one))
    kinds = {info.kind for path, _, info in walk(segment) if not path.startswith(inner)}
    return "exact" in kinds and "coefficients" not in kinds


def _positions(segment: Any, row: int, heads: int) -> list[np.ndarray]:
    """Of the tokens that each kv head holds."""
    count, where = int(to_host(segment.length)[row]), segment.positions
    slots = jnp.arange(1 << count.bit_length())  # more than there are: a few sizes, each a program
    of_slots = np.atleast_2d(to_host(where.at(slots))[row])[:, :count]  # [J, S] of J buffers
    owner = getattr(where, "owner", None)
    if owner is None:
        return [of_slots[head * len(of_slots) // heads] for head in range(heads)]
    owner = to_host(owner)[row, 0, :count]
    return [of_slots[0][owner == head] for head in range(heads)]
