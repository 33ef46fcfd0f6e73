"""MiniCache: adjacent layers share the directions of their tokens (Liu et al., 2024, "MiniCache")."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import merge
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.layer_groups import stride_groups
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Codec, Ends, Tokens
from lowrank_kv_jax.method.group import LayerGroup
from lowrank_kv_jax.method.token_share import share_of
from lowrank_kv_jax.pallas_kernels.coefficient_attention import attend_to
from lowrank_kv_jax.segments.merged import Listed, Merged, angle, empty_merged, layer_tokens, slerp
from lowrank_kv_jax.storage.cache_dtype import narrow
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.state import leaf, state, write_tokens


@state
class Retained:
    """Prompt tokens of one layer that are not merged.

    Attributes:
        k, v: keys (after RoPE) and values `[B, K, S, D]`; v has no channels where the keys are the values (latent
            attention).
    """

    k: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")
    v: jax.Array = leaf("batch", "kv_heads", "tokens", "head_dim", kind="exact")


@state
class MergedStore:
    """The prompt's tokens of two merged layers.

    Attributes:
        retained: of each layer, the prompt's tokens that were not merged.
        length: int32 `[B]`, retained tokens of each row.
        positions: of the retained tokens.
        merged: all other tokens of the prompt.
    """

    retained: tuple[Retained, Retained]
    length: jax.Array = leaf("batch", kind="indices")
    positions: Listed
    merged: Merged


@register("minicache")
@dataclasses.dataclass(frozen=True)
class MiniCache(Codec):
    """SLERP merge of each pair of adjacent layers from the middle of the model up.

    Of a token and head in two layers one direction is kept, interpolated on the sphere, with both
    magnitudes; keys and values apart. Tokens whose directions differ most are retained in both layers, and
    so is all that is appended after the prompt. With every upper pair merged the cache is about 1.3 times
    smaller.

    The paper's formula for the retained set, read literally, keeps the tokens that are *most similar*, and
    so does the re-implementation in circulation; `retain="similar"` does that. The paper's text, and the
    default here, keep those of the largest angular distance. A fixed share of tokens replaces its threshold,
    which gives no static shape.

    Of latent attention (MLA; xKV, figure 4) latents are merged and rotary keys are not. A normed latent is as long in one
    layer as in another, so that only its direction is lost.

    Attributes:
        start: first layer that is merged, a number (int) or a share of the depth (float).
        t: how far the direction lies from the first layer's towards the second's.
        keep: share of the prompt's tokens that is retained, gamma; 0.05 where `keep` and `budget` are None.
        budget: instead of `keep`: number of retained tokens.
        retain: "distant", or "similar".
    """

    start: int | float = 0.5
    t: float = 0.6
    keep: float | None = None
    budget: int | None = None
    retain: str = "distant"

    exact_at: ClassVar[Mapping[str, Any] | None] = {"keep": 1.0}
    small: ClassVar[Mapping[str, Any]] = {"budget": 24, "start": 0}
    per_token: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    latents: ClassVar[bool] = True

    def __post_init__(self):
        if (
            isinstance(self.start, bool)
            or self.start < 0
            or (isinstance(self.start, float) and self.start > 1)
        ):
            raise ValueError(f"start={self.start!r}: must be a layer, or a fraction in [0, 1]")
        if not 0 <= self.t <= 1:
            raise ValueError(f"t={self.t!r}: must lie in [0, 1]")
        if self.keep is not None and self.budget is not None:
            raise ValueError(f"keep={self.keep!r}, budget={self.budget!r}: give at most one of them")
        if self.keep is not None and not 0 <= self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in [0, 1]")
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            raise ValueError(f"budget={self.budget!r}: must be an int of at least 0")
        if self.retain not in ("distant", "similar"):
            raise ValueError(f"retain={self.retain!r}: allowed are distant, similar")

    # ---- groups --------------------------------------------------------------------------------------------

    def layer_groups(self, spec: AttentionSpec) -> tuple[tuple[int, ...], ...]:
        first = int(self.start * spec.num_layers) if isinstance(self.start, float) else self.start
        if first > spec.num_layers:
            raise ValueError(f"start={self.start!r}: the model has {spec.num_layers} layers")
        return stride_groups(spec.num_layers, 2, first)

    def validate(self, spec: AttentionSpec) -> None:
        self.layer_groups(spec)

    def default_bases(self, spec):
        """How many layers each group has: nothing is fitted."""
        return tuple(LayerGroup(len(group)) for group in self.layer_groups(spec))

    def _retained(self, lengths):
        """How many tokens of prompts of these lengths are retained; for arrays and numbers."""
        if self.budget is not None:
            return jnp.minimum(lengths, self.budget)
        return share_of(lengths, 0.05 if self.keep is None else self.keep)

    # ---- the contract --------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        """Layers that are not merged hold all of their tokens exactly; of the others what is appended is exact."""
        return Ends(layout.capacity if bases.layers == 1 else 0, 0, flushes=False)

    def empty(self, layout, bases, size, positions=None):
        if bases.layers == 1:
            return None
        spec, dtype, kept = layout.spec, jnp.dtype(layout.dtype), self._slots(layout)
        latent = spec.latent and spec.latent.rank
        buffer = jnp.zeros((layout.batch, spec.kv_heads, max(kept, 1), spec.head_dim), dtype)
        merged = empty_merged(layout.batch, spec.kv_heads, max(layout.prompt - kept, 1), spec.head_dim, dtype, latent)
        values = buffer if latent is None else buffer[..., :0]
        return MergedStore(
            (Retained(buffer, values),) * 2, jnp.zeros((layout.batch,), jnp.int32),
            Listed(jnp.zeros((layout.batch, max(kept, 1)), jnp.int32)), merged,
        )

    def _slots(self, layout: Layout) -> int:
        """Static number of retained tokens."""
        if self.budget is not None:
            return min(self.budget, layout.prompt)
        return share_of(layout.prompt, 0.05 if self.keep is None else self.keep)

    def take_in(self, layout, bases, store, tokens, counts, seen, positions=None, of_prompt=False):
        if positions is None:
            return self._take_more(layout, store, tokens, counts)
        retained = self._retained(counts)
        there = jnp.arange(tokens[0].k.shape[1])[None] < counts[:, None]
        kept, rest = self._choose(layout, tokens, there, retained)
        held = tuple(
            Retained(_gather(one.k, kept, old.k), _gather(one.v, kept, old.v))
            for one, old in zip(tokens, store.retained, strict=True)
        )
        listed = _listed(kept, store.positions)
        merged = self._merge(layout, store.merged, tokens, rest, counts - retained)
        return MergedStore(held, retained, listed, merged)

    def _take_more(
        self, layout: Layout, store: MergedStore, tokens: tuple[Tokens, ...], counts: jax.Array
    ) -> MergedStore:
        """A further chunk of the prompt: retained tokens and new ones are candidates, and what goes is merged."""
        slots, merged = store.positions.position.shape[1], store.merged

        def joined(old: jax.Array, new: jax.Array) -> jax.Array:  # [B, K, n, D] and [B, T, K, D]
            return jnp.concatenate([old.swapaxes(1, 2).astype(new.dtype), new], axis=1)

        at = jnp.concatenate([store.positions.position, tokens[0].positions], axis=1)
        found = tuple(
            Tokens(k := joined(held.k, one.k), k, joined(held.v, one.v), at)
            for held, one in zip(store.retained, tokens, strict=True)
        )
        there = jnp.concatenate(
            [jnp.arange(size)[None] < n[:, None] for size, n in ((slots, store.length), (at.shape[1] - slots, counts))],
            axis=1,
        )
        keep = self._retained(store.length + merged.length + counts)
        kept, rest = self._choose(layout, found, there, keep)
        held = tuple(
            Retained(_gather(one.k, kept, old.k), _gather(one.v, kept, old.v))
            for one, old in zip(found, store.retained, strict=True)
        )
        listed = _listed(jnp.take_along_axis(at, kept, axis=1), store.positions)
        gone, room = store.length + counts - keep, merged.k.shape[2]
        sides = {name: write_tokens(getattr(merged, name), _picked(x, rest[:, :room]), merged.length, gone)
                 for name, x in self._directions(layout, found).items()}
        before, new = merged.positions.position, jnp.take_along_axis(at, rest[:, :room], axis=1)
        where = write_tokens(before[:, None, :, None], new[:, None, :, None], merged.length, gone)
        merged = dataclasses.replace(
            merged, **sides, length=merged.length + gone, positions=Listed(where[:, 0, :, 0]))
        return MergedStore(held, keep, listed, merged)

    def _choose(
        self, layout: Layout, tokens: tuple[Tokens, ...], valid: jax.Array, keep: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Token indices `[B, S]`: retained ones first, and merged ones first, in the order of the text.

        Args:
            valid: bool `[B, S]`.
            keep: int32 `[B]`, how many are retained.
        """
        distance = sum(angle(x, y).sum(-1) for x, y in _pairs(layout, tokens).values())
        score = jnp.where(valid, distance if self.retain == "distant" else -distance, -jnp.inf)
        order = jnp.argsort(jnp.argsort(-score, axis=1), axis=1)
        kept = valid & (order < keep[:, None])
        rest = valid & ~kept
        return jnp.argsort(~kept, axis=1, stable=True), jnp.argsort(~rest, axis=1, stable=True)

    def _merge(
        self, layout: Layout, segment: Merged, tokens: tuple[Tokens, ...], index: jax.Array, counts: jax.Array
    ) -> Merged:
        sides = {name: _gather(x, index, getattr(segment, name)) for name, x in self._directions(layout, tokens).items()}
        return dataclasses.replace(segment, **sides, length=counts, positions=_listed(index, segment.positions))

    def _directions(self, layout: Layout, tokens: tuple[Tokens, ...]) -> dict[str, jax.Array]:
        """What a merged segment holds of tokens of two layers, `[B, S, K, ..]` each."""
        sides = {}
        for side, (x, y) in _pairs(layout, tokens).items():
            sides[side] = slerp(x, y, self.t)
            sides[f"{side}_norm"] = jnp.stack([jnp.linalg.norm(z, axis=-1) for z in (x, y)], axis=-1)
        if layout.spec.latent is not None:
            sides["rotary"] = jnp.concatenate([one.k[..., : -layout.spec.latent.rank] for one in tokens], axis=-1)
        return sides

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        held, rule = store.retained[place.index], layout.spec.logits
        values = held.v if layout.spec.latent is None else held.k
        retained = Beside(q, CachedTokens(held.k, values, store.length, store.positions), positions, False, place.window)
        merged = Beside(q, layer_tokens(store.merged, place.index), positions, False, place.window)
        return merge([attend_to(retained, **rule), attend_to(merged, **rule, beside=beside)], layout.spec.kv_heads)


def _pairs(layout: Layout, tokens: tuple[Tokens, ...]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """What is merged of two layers' tokens, float32 `[B, S, K, ..]` by side: keys and values, or normed latents."""
    first, second = tokens
    if layout.spec.latent is not None:
        sides = {"k": [one.k[..., -layout.spec.latent.rank :] for one in tokens]}
    else:
        sides = {"k": [first.k, second.k], "v": [first.v, second.v]}
    return {side: (x.astype(jnp.float32), y.astype(jnp.float32)) for side, (x, y) in sides.items()}


def _gather(x: jax.Array, index: jax.Array, like: jax.Array) -> jax.Array:
    """Tokens `[B, S, K, ..]` at `index` `[B, S]`, to fill a buffer like `like` `[B, K, slots, ..]`."""
    picked = _picked(x, index[:, : like.shape[2]])
    if picked.shape[2] < like.shape[2]:  # a first chunk is shorter than the prompt that there is room for
        return like.at[:, :, : picked.shape[2]].set(narrow(picked, like.dtype))
    return narrow(picked, like.dtype)


def _listed(index: jax.Array, like: Listed) -> Listed:
    """Positions `index` `[B, S]` in as many slots as `like` has."""
    index = index[:, : like.position.shape[1]].astype(jnp.int32)
    return Listed(jnp.pad(index, ((0, 0), (0, like.position.shape[1] - index.shape[1]))))


def _picked(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tokens `[B, S, K, ..]` at `index` `[B, n]`, `[B, K, n, ..]`."""
    return jax.vmap(lambda row, i: jnp.take(row, i, axis=0))(x, index).swapaxes(1, 2)
