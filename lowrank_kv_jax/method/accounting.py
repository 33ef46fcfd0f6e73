"""Bytes that exist: sums over the real leaves of a cache, by what they are spent on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.storage.on_host import OnHost
from lowrank_kv_jax.storage.sharding import leaf_sharding
from lowrank_kv_jax.storage.state import KINDS, walk


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache.

    Attributes:
        by_kind: bytes for each of `state.KINDS`; calibrated bases that the cache is read with are counted once.
        tokens: tokens for which the buffers were made, over all rows.
        full: bytes of a 16-bit full cache of the same tokens.
        on_host: of all bytes, those that lie in the memory of the host.
        shared: of all bytes, those of calibrated bases, which all caches of a model and method share.
    """

    by_kind: dict[str, int]
    tokens: int
    full: int
    on_host: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    @property
    def per_token(self) -> float:
        return self.total / self.tokens

    @property
    def smaller(self) -> float:
        """How many times smaller than the 16-bit full cache."""
        return self.full / self.total

    @property
    def smaller_apart(self) -> float:
        """The same of what a request adds: without what is shared."""
        return self.full / (self.total - self.shared)


def nbytes(x: Any) -> int:
    """Of an array, or of the shape of one."""
    return int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize


def state_bytes(state: Any) -> int:
    """Bytes of a state (arrays, or their shapes from `jax.eval_shape`)."""
    return sum(nbytes(x) for _, x, _ in walk(state))


def bytes_on_devices(cache: Any) -> int:
    """Bytes of a cache on all devices of its mesh together: what each of them holds a copy of counts for each."""
    mesh = cache.layout.mesh
    if mesh is None:
        return state_bytes(cache)
    total = 0
    for _, x, info in walk(cache):
        own = leaf_sharding(mesh, info, x.shape).shard_shape(tuple(x.shape))
        total += mesh.size * math.prod(own) * np.dtype(x.dtype).itemsize
    return total


def full_cache_bytes(spec: AttentionSpec, tokens: int) -> int:
    """Bytes of 16-bit keys and values of `tokens` tokens in all layers."""
    return 2 * spec.num_layers * spec.cached_channels * tokens


def cache_bytes(cache: Any, bases: Any = None) -> CacheBytes:
    """Account for every leaf of `cache` (arrays, or their shapes from `jax.eval_shape`) and of `bases`.

    Buffers count in full, the slots still free included: they are what the device has to hold.

    Args:
        cache: a `Cache`, or the `LayerCache` of each layer of a model, not stacked.
    """
    for one in cache if isinstance(cache, list | tuple) and cache else (cache,):
        if not hasattr(one, "layout"):
            raise ValueError(f"cache is a {type(one).__name__}: must be a cache, such as `.cache` of a Generation, or a "
                             "list of those of all layers")
    by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    on_host = 0
    for _, array, info in walk(cache):
        by_kind[info.kind] += nbytes(array)
        on_host += nbytes(array) if isinstance(array, OnHost) else 0
    shared = sum(nbytes(x) for x in jax.tree.leaves(bases))
    by_kind["bases"] += shared
    layout = cache[0].layout if isinstance(cache, Sequence) else cache.layout
    tokens = layout.batch * layout.capacity
    return CacheBytes(by_kind, tokens, full_cache_bytes(layout.spec, tokens), on_host, shared)
