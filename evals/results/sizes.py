"""What a method costs on paper, beside what its leaves weigh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.accounting import cache_bytes, full_cache_bytes
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype, floating
from lowrank_kv_jax.storage.state import map_leaves

_LENGTHS = (1 << 16, 1 << 17)


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of one row of a cache.

    Attributes:
        total, per_token, full, by_kind, shared: as in `accounting.CacheBytes`; bases and every other leaf included.
        nominal_smaller: the ratio of very long prompts, see `nominal_smaller`.
        compressed: share of the buffers' tokens that is not held exactly.
    """

    total: int
    per_token: float
    full: int
    by_kind: dict[str, int]
    shared: int
    nominal_smaller: float | None
    compressed: float

    @property
    def smaller(self) -> float:
        return self.full / self.total

    @property
    def smaller_apart(self) -> float:
        return self.full / (self.total - self.shared)


def size_fields(size: Size) -> dict[str, Any]:
    """What records hold of it."""
    return {
        "cache_bytes": size.total, "shared_bytes": size.shared, "full_cache_bytes": size.full,
        "bytes_per_token": size.per_token, "bytes_by_kind": size.by_kind, "smaller": size.smaller,
        "smaller_apart": size.smaller_apart, "nominal_smaller": size.nominal_smaller,
        "compressed_fraction": size.compressed,
    }


def size_of(cache: Cache, bases: Any = None) -> Size:
    """Measure one row of a cache from its leaves, whose shapes alone are read."""
    def one_row(info, x):
        shape = tuple(1 if axis == "batch" else size for axis, size in zip(info.axes, x.shape, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype)

    row = map_leaves(one_row, dataclasses.replace(cache, layout=dataclasses.replace(cache.layout, batch=1)))
    stored = cache_bytes(row, bases)
    width = jnp.dtype(cache.layout.dtype).itemsize
    exact = stored.by_kind["exact"] / (stored.full * width / 2)
    nominal = nominal_smaller(cache.method, cache.layout.spec, bases, cache.layout.dtype)
    return Size(stored.total, stored.per_token, stored.full, stored.by_kind, stored.shared, nominal, max(0.0, 1 - exact))


def nominal_smaller(
    method: Part, spec: AttentionSpec, bases: Any = None, dtype: Any = None
) -> float | None:
    """How many times smaller each further prompt token is than in a 16-bit full cache.

    This is the ratio that papers print: exact windows, bases and buffers for new tokens, which do not grow
    with the prompt, vanish in it. None where a method holds a fixed number of tokens, so that further ones
    cost nothing.
    """
    dtype = floating(default_cache_dtype() if dtype is None else dtype).name
    sizes, block = [], method.default_block
    for prompt in _LENGTHS:
        layout = Layout(spec, 1, prompt, prompt + block, block, dtype)
        sizes.append(cache_bytes(abstract_cache(method, layout, bases)).total)
    tokens = _LENGTHS[1] - _LENGTHS[0]
    grown = sizes[1] - sizes[0]
    return full_cache_bytes(spec, tokens) / grown if grown > 0 else None
