"""Quest: pages whose keys could match a query (Tang et al., 2024, "Query-Aware Sparsity")."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.pallas_kernels.page_choice import page_logits
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.state import leaf, state


@state
class Bounds:
    """Channel-wise bounds of the keys of each page of one layer.

    Attributes:
        low, high: `[B, K, C, D]`; of a page without a token, high lies below low.
    """

    low: jax.Array = leaf("batch", "kv_heads", "chunks", "head_dim", kind="indices")
    high: jax.Array = leaf("batch", "kv_heads", "chunks", "head_dim", kind="indices")


@register("quest")
@dataclasses.dataclass(frozen=True)
class Quest(Reading):
    """Everything stays; each step reads the pages whose keys could give the highest logits.

    A page's bound is sum_d max(q_d low_d, q_d high_d) (section 3.2). Pages are read for a kv head (for all heads where
    they share codes): where several query heads share one, their softmax over the bounds is added up.

    Attributes:
        budget: tokens that a step reads, in whole pages, the exact ends not included.
        keep: instead: this fraction of the capacity; 1.0 reads everything.
        page: tokens of a page.
        sinks, recent: first and last tokens that are always read, where the codec has no ends of its own.
        dense_layers: first layers that read everything, two in the paper.
    """

    budget: int | None = None
    keep: float | None = 0.25
    page: int = 16
    sinks: int = 4
    recent: int = 32
    dense_layers: int = 2

    exact_at: ClassVar[Mapping[str, Any] | None] = {"keep": 1.0, "sinks": 4, "recent": 8}
    small: ClassVar[Mapping[str, Any]] = {"budget": 24, "keep": None, "sinks": 4, "recent": 8, "dense_layers": 0}

    def __post_init__(self):
        super().__post_init__()
        if (self.budget is None) == (self.keep is None):
            raise ValueError(f"budget={self.budget!r}, keep={self.keep!r}: give exactly one of them")
        for field, least in (("budget", 1), ("page", 1), ("sinks", 0), ("recent", 0), ("dense_layers", 0)):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in (0, 1]")

    def pages(self, layout: Layout, there: int) -> int:
        if self.keep == 1:
            return there
        tokens = self.budget if self.keep is None else round(self.keep * layout.capacity)
        return min(-(-max(tokens or 0, 1) // self.page), there)

    def empty(self, layout, pages):
        spec, dtype = layout.spec, jnp.dtype(layout.dtype)
        most = jnp.full((layout.batch, spec.kv_heads, pages, spec.head_dim), jnp.finfo(dtype).max, dtype)
        return Bounds(most, -most)

    def add(self, marks, k, start, counts):
        slots = jnp.arange(k.shape[1])
        where = jnp.where(slots < counts[:, None], (start[:, None] + slots) // self.page, marks.low.shape[2])
        k = narrow(k.swapaxes(1, 2), marks.low.dtype)
        low = jax.vmap(lambda held, at, new: held.at[:, at].min(new, mode="drop"))(marks.low, where, k)
        high = jax.vmap(lambda held, at, new: held.at[:, at].max(new, mode="drop"))(marks.high, where, k)
        return Bounds(low, high)

    def logits(self, marks, q):
        def by_xla() -> jax.Array:
            wide, low, high = (x.astype(jnp.float32) for x in (q, marks.low, marks.high))
            above, below = jnp.maximum(wide, 0.0), jnp.minimum(wide, 0.0)
            return jnp.einsum("bkmd,bkcd->bkmc", above, high) + jnp.einsum("bkmd,bkcd->bkmc", below, low)

        return page_logits(q, marks.high, marks.low, reference=by_xla)
