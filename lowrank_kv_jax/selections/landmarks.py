"""Pages known by their mean keys, as ShadowKV (Sun et al., 2024) and xKV's `rebuild` choose them."""

import dataclasses

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.pallas_kernels.page_choice import page_logits
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.state import leaf, state


@state
class Means:
    """Mean keys after RoPE of each page of one layer.

    Attributes:
        k: `[B, K, C, D]`, zero of a page without a token.
    """

    k: jax.Array = leaf("batch", "kv_heads", "chunks", "head_dim", kind="indices")


@dataclasses.dataclass(frozen=True)
class Landmarks(Reading):
    """The pages of which the queries' softmax over mean keys makes most.

    Attributes:
        read: tokens that a step reads, in whole pages: a number, or a fraction of those there is room for.
        page: tokens of a page.
        together: "sum" of the query heads that share pages, or the "max" of them.
    """

    read: int | float = 0.25
    page: int = 32
    together: str = "sum"

    def pages(self, layout: Layout, there: int) -> int:
        if isinstance(self.read, float):
            return max(1, round(self.read * there))
        return min(-(-self.read // self.page), there)

    def empty(self, layout, pages):
        spec = layout.spec
        return Means(jnp.zeros((layout.batch, spec.kv_heads, pages, spec.head_dim), jnp.dtype(layout.dtype)))

    def add(self, marks, k, start, counts):
        count, slots = marks.k.shape[2], jnp.arange(k.shape[1])
        where = jnp.where(slots < counts[:, None], (start[:, None] + slots) // self.page, count)
        firsts = jnp.arange(count) * self.page
        before, after = (jnp.clip(n[:, None] - firsts, 0, self.page)[:, None, :, None] for n in (start, start + counts))
        total = marks.k.astype(jnp.float32) * before
        k = k.swapaxes(1, 2).astype(jnp.float32)
        total = jax.vmap(lambda held, at, new: held.at[:, at].add(new, mode="drop"))(total, where, k)
        return Means(narrow(total / jnp.maximum(after, 1), marks.k.dtype))

    def logits(self, marks, q):
        return page_logits(q, marks.k, reference=lambda: jnp.einsum(
            "bkmd,bkcd->bkmc", q.astype(jnp.float32), marks.k.astype(jnp.float32)))
