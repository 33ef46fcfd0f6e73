"""What the low-rank methods share that code one token at a time: coefficients in one frame a layer."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.codecs.component_bits import mean_bits, typical_profile, uniform_bits
from lowrank_kv_jax.codecs.frame import Frame, as_met, as_seen
from lowrank_kv_jax.codecs.frame_attention import attend
from lowrank_kv_jax.codecs.lowrank_fields import LowRankFields
from lowrank_kv_jax.estimators.bit_allocation import Profile
from lowrank_kv_jax.estimators.row_steps import calibrated_steps, drawn_steps, fitted_steps
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, codes_of
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import fold_query
from lowrank_kv_jax.storage.positions import PerHead
from lowrank_kv_jax.storage.quantised import COEFFICIENTS, Tile, read_tokens
from lowrank_kv_jax.storage.state import leaf, state
from lowrank_kv_jax.storage.steps import Steps, plain_steps
from lowrank_kv_jax.storage.water_filled import empty_water_filled

SIDES = ("k", "v")


@state
class LowRankStore:
    """One layer's tokens as coefficients.

    Attributes:
        tokens: the coefficients.
        k_basis, v_basis: `[B, J, W, R]` where a method moves its basis; None where calibration's bases are read.
        k_steps, v_steps: what codes count in where components have bits of their own; None otherwise.
    """

    tokens: coded_tokens.Coded
    k_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    k_steps: Steps | None
    v_steps: Steps | None


@dataclasses.dataclass(frozen=True)
class LowRank(LowRankFields, TokenCodec):
    """Abstract. A family says in which frame its coefficients are read, where bases come from and when they move.

    Attributes:
        prefill: what a prompt attends to: "exact", its own keys and values; "compressed", layer after layer what they are
            coded as, which is what low-rank projections in the place of W_k and W_v do (Palu, StreamingKV). The exact
            tokens at both ends stay exact; coefficients are not rounded to `bits`.
    """

    prefill: str = "exact"

    adapts: ClassVar[bool] = False
    """Whether rows own their bases (a prompt-fitted or moving basis)."""

    foldable: ClassVar[bool] = True
    """Whether queries fold into the basis of keys that are coded after RoPE."""

    waters: ClassVar[bool] = True

    @abc.abstractmethod
    def frame(self, spec: AttentionSpec, bases: Any, store: LowRankStore | None) -> Frame:
        """What the coefficients of `store` are read in, and tokens coded in; without one, before anything was seen."""

    def __post_init__(self):
        super().__post_init__()
        if self.prefill not in ("exact", "compressed"):
            raise ValueError(f"prefill={self.prefill!r}: allowed are exact, compressed")

    @property
    def attends_codes(self):
        return self.prefill == "compressed"

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

    def profile(self, spec: AttentionSpec, bases: Any) -> Profile | None:
        """Widths of the components of keys and of values that are stored; None where all have as many bits."""
        bits = mean_bits(self.bits)
        if bits is None:
            return None
        return bases.widths.rungs[0] if self.calibrated else typical_profile(*self.ranks(spec), bits)

    def empty_store(
        self, layout: Layout, bases: Any, size: int, positions: PerHead | None, k_basis: jax.Array | None = None,
        v_basis: jax.Array | None = None,
    ) -> LowRankStore:
        """An empty store with these bases of each row, if any; see `Codec.empty`."""
        k, v = self.frame(layout.spec, bases, None)[:2]
        profile, dtype, batch = self.profile(layout.spec, bases), jnp.dtype(layout.dtype), layout.batch
        if profile is None:
            tile, shapes = tile_for(size, positions), ((u.shape[0], u.shape[-1]) for u in (k, v))
            bits = uniform_bits(self.bits)
            tokens = coded_tokens.empty_coded(batch, *shapes, size, dtype, bits, tile, tile, positions)
            return LowRankStore(tokens, k_basis, v_basis, None, None)
        packed = positions is not None and positions.owner is not None
        buffers = (empty_water_filled(batch, 1 if packed else u.shape[0], size, runs)
                   for u, runs in zip((k, v), profile, strict=True))
        tokens = coded_tokens.without_tokens(*buffers, positions)
        if self.calibrated:
            steps = (calibrated_steps(getattr(bases, f"{side}_scale"), getattr(bases, f"{side}_zero"), runs, batch, dtype)
                     for side, runs in zip(SIDES, profile, strict=True))
        else:
            steps = (plain_steps((batch, u.shape[0], u.shape[-1]), dtype) for u in (k, v))
        return LowRankStore(tokens, k_basis, v_basis, *steps)

    def with_steps_of(self, layout: Layout, bases: Any, store: Any, taps: tuple[Taps, ...], weight: jax.Array) -> Any:
        """An empty store, its bases fitted, with the steps and zeros of a prompt; as it is where codes count in none.

        Args:
            weight: float32 `[B, T]`, 1 for the tokens that will be coded.
        """
        profile = self.profile(layout.spec, bases)
        if profile is None:
            return store
        (tap,), found = taps, {}
        codes = self.frame(layout.spec, bases, store).code(*(x.astype(jnp.float32) for x in self.sides(tap)))
        for side, x, runs in zip(SIDES, codes, profile, strict=True):
            if self.calibrated:
                known = (getattr(bases, f"{side}_{name}") for name in ("scale", "zero"))
                found[f"{side}_steps"] = drawn_steps(x, weight, *known, runs, layout.dtype)
            else:
                found[f"{side}_steps"] = fitted_steps(x, weight, runs, layout.dtype)
        return dataclasses.replace(store, **found)

    def reads_in(self, spec: AttentionSpec, bases: Any, store: LowRankStore) -> Frame:
        """The frame in which what is stored is read: that of the coefficients, or of their codes."""
        return self.frame(spec, bases, store).of_codes(store.k_steps, store.v_steps, spec.kv_heads)

    def encode(self, layout, bases, store, tokens):
        (one,) = tokens
        k, v = self.frame(layout.spec, bases, store).code(*self.sides(one))
        return (k, v) if store.k_steps is None else (store.k_steps.count(k), store.v_steps.count(v))

    def decode(self, layout, bases, store, k, v, positions, index):
        spec, frame = layout.spec, self.reads_in(layout.spec, bases, store)
        k = as_seen(frame.keys(spec, self.rope, k, positions), frame.gamma)
        return k, frame.at(positions).rebuild("v", v, spec.kv_heads)

    def attend(self, layout, bases, store, q, positions, place, beside=None):
        frame, tokens = self.reads_in(layout.spec, bases, store), coded_tokens.cached_tokens(store.tokens)
        return attend(layout.spec, frame, tokens, q, positions, place, folds=self.folds, rotates=self.rope == "pre",
                      reduced=self.order == "reduced", beside=beside)

    def logits(self, layout, bases, store, q, place):
        spec, tokens, frame = layout.spec, store.tokens, self.reads_in(layout.spec, bases, store)
        q = as_met(q, frame.gamma)
        if self.folds and frame.k_mean is None:
            return Logits(fold_query(frame.k, q, spec.kv_heads), tokens.k)
        return Logits(q, frame.keys(spec, self.rope, codes_of(store)[0], tokens.positions))

    def rebuilt(self, layout: Layout, bases: Any, store: LowRankStore) -> tuple[jax.Array, jax.Array]:
        """What attention sees of the stored tokens: keys (before RoPE where they are coded so) and values, float32
        `[B, K, S, D]`."""
        frame, heads = self.reads_in(layout.spec, bases, store), layout.spec.kv_heads
        k, v = (frame.rebuild(side, read_tokens(getattr(store.tokens, side)), heads) for side in SIDES)
        return as_seen(k, frame.gamma), v


def of_each_row(layout: Layout, *bases: jax.Array, dtype: Any = None) -> Iterator[jax.Array]:
    """Bases `[J, W, R]` as every row's own `[B, J, W, R]`, in the cache's dtype or another."""
    return (jnp.broadcast_to(u.astype(dtype or layout.dtype), (layout.batch, *u.shape)) for u in bases)


def tile_for(size: int, positions: PerHead | None) -> Tile:
    """What shares a scale: no more tokens than a selection keeps."""
    return COEFFICIENTS if positions is None else Tile(min(COEFFICIENTS.tokens, max(size, 1)), COEFFICIENTS.channels)
