"""ShadowKV: low-rank keys, values elsewhere, and a few pages a step (Sun et al., 2024, arXiv 2410.21465)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.refit import refit
from lowrank_kv_jax.estimators.rank import check_rank, resolve_rank
from lowrank_kv_jax.estimators.subspace_iteration import leading_subspace, wide_gram
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Codec, Ends, Tokens, hold
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.selections.landmarks import Landmarks
from lowrank_kv_jax.storage.basis import project
from lowrank_kv_jax.storage.bits import Bits
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.on_host import MEMORY, PLACES, OnHost, has_host_memory, on_host
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.state import leaf, state, take_tokens, write_tokens


@state
class Shadows:
    """Tokens whose keys are coefficients.

    Attributes:
        k: of keys before RoPE `[B, 1, S, R]`, which all heads share; once a page was chosen `[B, K, S, R]`.
        v: values as they are `[B, K, S, D]`, on the device or on the host.
        length: int32 `[B]`.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "rank", kind="coefficients")
    v: jax.Array | OnHost = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    length: jax.Array = leaf("batch", kind="indices")
    positions: Runs | PerHead


@state
class Outliers:
    """Pages of tokens that are kept exactly, and always read.

    Attributes:
        k, v: keys after RoPE, and values `[B, K, O * page, D]`.
        length: int32 `[B]`, tokens of each head.
        pages: int32 `[B, K, O]`, which of the store's pages they are; where there are fewer, the number of all pages.
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    v: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    length: jax.Array = leaf("batch", kind="indices")
    pages: jax.Array = leaf("batch", "kv_heads", "chunks", kind="indices")


@state
class ShadowStore:
    """The stored tokens of one layer.

    Attributes:
        tokens: all of them, those of the outliers too: heads have outliers of their own, and share coefficients.
        basis: `[B, 1, K * D, R]`, of each row's keys before RoPE.
        outliers: None where none are kept.
    """

    tokens: Shadows
    basis: jax.Array = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    outliers: Outliers | None


@register("shadowkv")
@dataclasses.dataclass(frozen=True)
class ShadowKV(Codec):
    """Keys before RoPE in the SVD of each prompt, values as they are; a step reads the pages that its queries need.

    Pages of 8 tokens are known by landmarks, their mean keys after RoPE. Each kv head reads those of which one of its
    queries' softmax over the landmarks makes most (algorithm 2): keys are rebuilt from coefficients that all heads share,
    and rotated at their positions. Pages with a key that is least like its landmark (the smallest cosine of its tokens,
    algorithm 1) are kept exactly and always read. So are the prompt's last tokens and all that is decoded.

    Two things differ from the paper. The page of the last stored tokens, which may not be full, is always read as well:
    there the exact window reaches back to the last full page. And values stay on the device unless `values` says
    otherwise; wherever they lie, they count as bytes of the cache. With values on the host no GPU, TPU or mesh has run a
    step: a CPU, which has one memory, shows that the programs are right, and the compiler for a TPU v5e that the values
    stay on the host and pages are copied one by one. That for a GPU without a device does not tell memories apart.

    Attributes:
        rank: columns of the keys' basis (int), or a fraction of the width K * D. The paper has 160 of 1024.
        budget: tokens that a step reads, in whole pages, those that are exact not included.
        keep: instead: this fraction of the stored pages; 1.0 reads everything.
        page: tokens of a page.
        outliers: exact pages of each kv head.
        sinks: exact first tokens; the paper has none, and its outliers find them.
        recent: exact last tokens of the prompt.
        values: "device", or "host": in the memory of the host, as in the paper, from where a step copies the pages that
            it reads; outliers and exact tokens stay on the device.
    """

    rank: int | float = 0.15625
    budget: int | None = None
    keep: float | None = 0.25
    page: int = 8
    outliers: int = 4
    sinks: int = 4
    recent: int = 32
    values: str = "device"

    exact_at: ClassVar[Mapping[str, Any] | None] = {"rank": 1.0, "keep": 1.0, "sinks": 4, "recent": 8}
    small: ClassVar[Mapping[str, Any]] = {"budget": 24, "keep": None, "sinks": 4, "recent": 8, "outliers": 1}
    per_token: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"rank": 160, "budget": 2048, "keep": None, "outliers": 48, "sinks": 0}
    }

    def __post_init__(self):
        super().__post_init__()
        check_rank("rank", self.rank)
        if (self.budget is None) == (self.keep is None):
            raise ValueError(f"budget={self.budget!r}, keep={self.keep!r}: give exactly one of them")
        for field, least in (("budget", 1), ("page", 1), ("outliers", 0), ("sinks", 0), ("recent", 0)):
            value = getattr(self, field)
            if not (field == "budget" and value is None) and (type(value) is not int or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in (0, 1]")
        if self.values not in PLACES:
            raise ValueError(f"values={self.values!r}: allowed are {', '.join(PLACES)}")

    def validate(self, spec: AttentionSpec) -> None:
        self._rank(spec)
        if self.values == "host" and not has_host_memory():
            raise ValueError(f"values='host': this platform has no {MEMORY} memory; allowed is device")

    def _rank(self, spec: AttentionSpec) -> int:
        return resolve_rank("rank", self.rank, spec.kv_heads * spec.head_dim)

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, flushes=False)

    @property
    def reading(self):
        read = self.budget if self.keep is None else float(self.keep)
        assert read is not None
        return Landmarks(read, self.page, together="max")

    def apart(self, store):
        return None if store.outliers is None else store.outliers.pages

    def empty(self, layout, bases, size, positions=None):
        spec, dtype, rank = layout.spec, jnp.dtype(layout.dtype), self._rank(layout.spec)

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((layout.batch, *shape), dtype)

        heads, none = (spec.kv_heads, size, spec.head_dim), jnp.zeros((layout.batch,), jnp.int32)
        gaps = jnp.zeros((layout.batch, 1), jnp.int32)
        values = on_host(zeros(*heads)) if self.values == "host" else zeros(*heads)
        tokens = Shadows(zeros(1, size, rank), values, none, Runs(gaps, gaps))
        return ShadowStore(tokens, zeros(1, spec.kv_heads * spec.head_dim, rank), self._no_outliers(layout, size))

    def _no_outliers(self, layout: Layout, size: int) -> Outliers | None:
        """Room for the outliers among `size` stored tokens."""
        there = -(-size // self.page)
        most, heads = min(self.outliers, there), layout.spec.kv_heads
        if not most:
            return None
        buffer = jnp.zeros((layout.batch, heads, most * self.page, layout.spec.head_dim), jnp.dtype(layout.dtype))
        nowhere = jnp.full((layout.batch, heads, most), there, jnp.int32)
        return Outliers(buffer, buffer, jnp.zeros((layout.batch,), jnp.int32), nowhere)

    def learn(self, layout, bases, store, taps, lengths, weight):
        (tap,) = taps
        keys = _side_by_side(tap.k_pre) * weight[:, :, None, None]
        basis = leading_subspace(wide_gram(keys), store.basis.shape[-1])
        return dataclasses.replace(store, basis=narrow(basis, layout.dtype))

    def take_in(self, layout, bases, store, tokens, counts, seen, positions=None, of_prompt=False):
        if positions is None:
            return self._take_more(layout, store, tokens, counts)
        (one,) = tokens
        positions = Runs(positions.start[:, :1], positions.jump[:, :1])  # one run
        if not one.k.shape[1]:
            return dataclasses.replace(store, tokens=dataclasses.replace(store.tokens, positions=positions))
        coefficients = project(store.basis, _side_by_side(one.k_pre))
        store = hold(store, coefficients, one.v.swapaxes(1, 2), counts, positions)
        if store.outliers is None:
            return store
        most, there = store.outliers.pages.shape[2], self._pages(store)
        _, pages = outlier_pages(one.k, counts, self.page, most, there)
        k, v = (narrow(_tokens_of(x, pages, self.page), layout.dtype) for x in (one.k, one.v))
        held = jnp.minimum(counts // self.page, most) * self.page
        return dataclasses.replace(store, outliers=Outliers(k, v, held, pages))

    def _pages(self, store: ShadowStore) -> int:
        """Of all tokens that there is room for."""
        return -(-store.tokens.k.shape[2] // self.page)

    def _take_more(
        self, layout: Layout, store: ShadowStore, tokens: tuple[Tokens, ...], counts: jax.Array
    ) -> ShadowStore:
        """A further chunk of the prompt, in a basis for the stored keys, which are carried over, and the new ones."""
        (one,), held, start = tokens, store.tokens, store.tokens.length
        weight = (jnp.arange(one.k.shape[1])[None] < counts[:, None]).astype(jnp.float32)
        x, size, rank = _side_by_side(one.k_pre) * weight[:, :, None, None], held.k.shape[2], store.basis.shape[-1]
        codes, basis, _ = refit(
            layout, held, "k", store.basis, None, x, weight, wide_gram(x),
            lambda moment: narrow(leading_subspace(moment, rank), layout.dtype),
        )
        k = write_tokens(codes, project(basis, x)[:, :, :size], start, counts)
        v = write_tokens(held.v, one.v.swapaxes(1, 2)[:, :, :size], start, counts)
        held = dataclasses.replace(held, k=k, v=v, length=start + counts)
        more = dataclasses.replace(store, tokens=held, basis=basis)
        return more if store.outliers is None else dataclasses.replace(more, outliers=self._outliers(store, one, counts))

    def _outliers(self, store: ShadowStore, one: Tokens, counts: jax.Array) -> Outliers:
        """The old outliers and the new pages that lie in this chunk as a whole: the least alike of both."""
        old, start, page, there = store.outliers, store.tokens.length, self.page, self._pages(store)
        assert old is not None
        most, first = old.pages.shape[2], -(-start // page)  # the page that two chunks share is no candidate
        ahead = first * page - start
        k, v = (take_tokens(x.swapaxes(1, 2), ahead, one.k.shape[1]) for x in (one.k, one.v))
        keys = k.swapaxes(1, 2)
        unlike, pages = outlier_pages(keys, jnp.maximum(counts - ahead, 0), page, most, there)
        new = [narrow(_tokens_of(x.swapaxes(1, 2), jnp.minimum(pages, there - 1), page), old.k.dtype) for x in (k, v)]
        pages = jnp.where(pages < there, pages + first[:, None, None], there)
        before = unlikeness(_array(old.k).reshape(*old.k.shape[:2], most, page, -1))
        before = jnp.where(old.pages < there, before, -jnp.inf)
        score, chosen = jax.lax.top_k(jnp.concatenate([before, unlike], axis=2), most)

        def picked(x: jax.Array, y: jax.Array) -> jax.Array:
            both = jnp.concatenate([x.reshape(*x.shape[:2], most, -1), y.reshape(*y.shape[:2], most, -1)], axis=2)
            return jnp.take_along_axis(both, chosen[..., None], axis=2).reshape(x.shape)

        pages = jnp.where(jnp.isneginf(score), there, picked(old.pages, pages))
        held = jnp.sum(pages[:, 0] < there, axis=-1, dtype=jnp.int32) * page
        return Outliers(picked(_array(old.k), new[0]), picked(_array(old.v), new[1]), held, pages)

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        """Keys are rebuilt and rotated by blocks; outliers and other tokens are read as they are."""
        spec, tokens, outliers = layout.spec, store.tokens, store.outliers
        heads, some = tokens.k.shape[1], isinstance(tokens.positions, PerHead)
        others = [] if beside is None else [beside]
        basis = store.basis.reshape(store.basis.shape[0], heads, -1, store.basis.shape[-1])
        if outliers is not None and some:  # else all tokens are read, the outliers' among them
            nowhere = jnp.zeros(outliers.k.shape[:3], jnp.int32)  # no window: pages are read where there is none
            exact = CachedTokens(outliers.k, outliers.v, outliers.length, PerHead(nowhere, None, spec.kv_heads))
            others.append(Beside(q, exact, positions, False))
        return rotary_coefficient_attention(
            q, CachedTokens(tokens.k, tokens.v, tokens.length, tokens.positions), basis, rope=spec.rope,
            kv_heads=spec.kv_heads, **spec.logits, q_positions=positions, causal=False, window=place.window,
            beside=others,
        )


def _side_by_side(keys: jax.Array) -> jax.Array:
    """Keys `[B, S, K, D]` of all heads as one, float32 `[B, S, 1, K * D]`."""
    return keys.reshape(*keys.shape[:2], 1, -1).astype(jnp.float32)


def outlier_pages(
    k: jax.Array, counts: jax.Array, page: int, most: int, nowhere: int
) -> tuple[jax.Array, jax.Array]:
    """The whole pages with the keys least like their mean, the least alike first: how unlike, and which, `[B, K, O]`.

    Args:
        k: keys after RoPE `[B, T, K, D]`.
        counts: int32 `[B]`, how many of the T there are.
        most: O; a row that has fewer whole pages gets `nowhere` in the place of the others, which are unlike by -inf.
    """
    batch, tokens, heads, dim = k.shape
    there = max(-(-tokens // page), most)
    k = jnp.pad(k.astype(jnp.float32), ((0, 0), (0, there * page - tokens), (0, 0), (0, 0)))
    k = k.reshape(batch, there, page, heads, dim).transpose(0, 3, 1, 2, 4)
    whole = (jnp.arange(there) + 1) * page <= counts[:, None]
    unlike, pages = jax.lax.top_k(jnp.where(whole[:, None], unlikeness(k), -jnp.inf), most)
    return unlike, jnp.where(jnp.isneginf(unlike), nowhere, pages).astype(jnp.int32)


def unlikeness(k: jax.Array) -> jax.Array:
    """Of pages `[B, K, C, page, D]` the negative cosine of mean and the key least like it, float32 `[B, K, C]`."""
    k = k.astype(jnp.float32)
    mean = k.mean(3, keepdims=True)
    norms = jnp.linalg.norm(k, axis=-1) * jnp.linalg.norm(mean, axis=-1)
    return -(jnp.sum(k * mean, axis=-1) / jnp.maximum(norms, 1e-12)).min(3)


def _array(x: Any) -> jax.Array:
    return x.widened() if isinstance(x, Bits) else x


def _tokens_of(x: jax.Array, pages: jax.Array, page: int) -> jax.Array:
    """Tokens `[B, K, O * page, D]` of the pages `[B, K, O]` of `x` `[B, T, K, D]`."""
    slots = (pages[..., None] * page + jnp.arange(page)).reshape(*pages.shape[:2], -1)
    slots = jnp.minimum(slots, x.shape[1] - 1)
    return jnp.take_along_axis(x.swapaxes(1, 2), slots[..., None], axis=2)
