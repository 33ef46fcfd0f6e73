"""What the low-rank methods share that code one token at a time: coefficients in one frame a layer."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.frame import Frame, around, as_met, as_seen
from lowrank_kv_jax.codecs.lowrank_fields import LowRankFields
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, codes_of
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import expand_values, fold_query
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.quantised import COEFFICIENTS, Tile, read_tokens
from lowrank_kv_jax.storage.state import leaf, state


@state
class LowRankStore:
    """One layer's tokens as coefficients.

    Attributes:
        tokens: the coefficients.
        k_basis, v_basis: `[B, J, W, R]` where a method moves its basis; None where calibration's bases are read.
    """

    tokens: coded_tokens.Coded
    k_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")


@dataclasses.dataclass(frozen=True)
class LowRank(LowRankFields, TokenCodec):
    """Abstract. A family says in which frame its coefficients are read, where bases come from and when they move."""

    adapts: ClassVar[bool] = False
    """Whether rows own their bases (a prompt-fitted or moving basis)."""

    foldable: ClassVar[bool] = True
    """Whether queries fold into the basis of keys that are coded after RoPE."""

    @abc.abstractmethod
    def frame(self, spec: AttentionSpec, bases: Any, store: LowRankStore | None) -> Frame:
        """What the coefficients of `store` are read in, and tokens coded in; without one, before anything was seen."""

    @property
    def folds(self) -> bool:
        """Whether logits are products in coefficient space."""
        return self.rope == "post" and self.foldable

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, pinned=self.recent_of == "prompt", flushes=self.decoded == "coded",
                    asked=(self.sinks, self.recent))

    def units(self, spec, bases):
        return self.frame(spec, bases, None).k.shape[0]

    def no_tokens(self, layout: Layout, bases: Any, size: int, positions: PerHead | None) -> coded_tokens.Coded:
        """What an empty store has room for tokens in; see `Codec.empty`."""
        shapes = ((u.shape[0], u.shape[-1]) for u in self.frame(layout.spec, bases, None)[:2])
        tile = tile_for(size, positions)
        return coded_tokens.empty_coded(
            layout.batch, *shapes, size, jnp.dtype(layout.dtype), self.bits, tile, tile, positions
        )

    def encode(self, layout, bases, store, tokens):
        (one,) = tokens
        return self.frame(layout.spec, bases, store).code(*self.sides(one))

    def decode(self, layout, bases, store, k, v, positions, index):
        spec, frame = layout.spec, self.frame(layout.spec, bases, store)
        k = as_seen(frame.keys(spec, self.rope, k, positions), frame.gamma)
        return k, frame.at(positions).rebuild("v", v, spec.kv_heads)

    def attend(self, layout, bases, store, q, positions, place):
        spec, tokens = layout.spec, coded_tokens.cached_tokens(store.tokens)
        frame, reduced = self.frame(spec, bases, store), self.order == "reduced"
        q = as_met(q, frame.gamma)
        common: dict[str, Any] = dict(**spec.logits, q_positions=positions, causal=False, window=place.window)
        if self.folds and reduced:
            out, lse = coefficient_attention(fold_query(frame.k, q, spec.kv_heads), tokens, **common)
        else:
            use = frame.at(tokens.positions)
            out, lse = rotary_coefficient_attention(
                q, tokens, use.k, rope=spec.rope if self.rope == "pre" else None, kv_heads=spec.kv_heads,
                value_basis=None if reduced else use.v, key_mean=use.k_mean, **common,
            )
        out = expand_values(frame.v, out, spec.kv_heads) if reduced else out
        return AttnPartial(around(out, lse, frame.v_mean), lse)

    def logits(self, layout, bases, store, q, place):
        spec, tokens, frame = layout.spec, store.tokens, self.frame(layout.spec, bases, store)
        q = as_met(q, frame.gamma)
        if self.folds:
            return Logits(fold_query(frame.k, q, spec.kv_heads), tokens.k)
        return Logits(q, frame.keys(spec, self.rope, codes_of(store)[0], tokens.positions))

    def rebuilt(self, layout: Layout, bases: Any, store: LowRankStore) -> tuple[jax.Array, jax.Array]:
        """What attention sees of the stored tokens: keys (before RoPE where they are coded so) and values, float32
        `[B, K, S, D]`."""
        frame, heads = self.frame(layout.spec, bases, store), layout.spec.kv_heads
        k, v = (frame.rebuild(side, read_tokens(getattr(store.tokens, side)), heads) for side in ("k", "v"))
        return as_seen(k, frame.gamma), v


def of_each_row(layout: Layout, *bases: jax.Array, dtype: Any = None) -> Iterator[jax.Array]:
    """Bases `[J, W, R]` as every row's own `[B, J, W, R]`, in the cache's dtype or another."""
    return (jnp.broadcast_to(u.astype(dtype or layout.dtype), (layout.batch, *u.shape)) for u in bases)


def tile_for(size: int, positions: PerHead | None) -> Tile:
    """What shares a scale: no more tokens than a selection keeps."""
    return COEFFICIENTS if positions is None else Tile(min(COEFFICIENTS.tokens, max(size, 1)), COEFFICIENTS.channels)
