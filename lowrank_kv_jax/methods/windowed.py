"""Caches that keep a window of recent tokens, with or without the first tokens of the sequence."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.method import KVMethod, register
from lowrank_kv_jax.methods.selecting import RecentOnly
from lowrank_kv_jax.partial import merge
from lowrank_kv_jax.rope import rope_angles, rotate
from lowrank_kv_jax.segments import exact as exact_tokens

DEFAULT_KEEP = 0.25


@dataclasses.dataclass(frozen=True)
class Windowed(KVMethod):
    """Abstract. `sinks` first tokens and the last `recent` ones; a query never sees more than these.

    Attributes:
        budget: tokens kept in all; `recent` = `budget` - `sinks`.
        keep: instead of `budget`: this fraction of the prompt's (padded) length; a quarter where neither is given.
    """

    budget: int | None = None
    keep: float | None = None

    stage: ClassVar[str | None] = "selection"

    def __post_init__(self):
        if self.budget is not None and self.keep is not None:
            raise ValueError(f"budget={self.budget!r}, keep={self.keep!r}: give one of them, not both")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in (0, 1]")
        if self.budget is not None and self.budget <= self._sinks():
            raise ValueError(f"budget={self.budget!r}: must exceed the {self._sinks()} sinks")

    def as_selection(self):
        """The rule as a stage of a composition: nothing stays between sinks and recent tokens."""
        return RecentOnly(budget=self.budget, keep=self.keep, sinks=self._sinks(),
                          positions=getattr(self, "positions", "original"))

    def _sinks(self) -> int:
        return getattr(self, "sinks", 0)

    def _recent(self, layout) -> int:
        keep = DEFAULT_KEEP if self.keep is None else self.keep
        budget = self.budget if self.budget is not None else round(keep * layout.prompt)
        return max(budget - self._sinks(), 1)

    def init(self, layout, bases):
        spec, sinks = layout.spec, self._sinks()
        size = min(sinks + self._recent(layout) + layout.block, layout.capacity + layout.block)
        return exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, size, spec.head_dim, jnp.dtype(layout.dtype), gaps=(sinks, sinks)
        )

    def compress(self, layout, bases, state, taps, lengths):
        (tap,) = taps
        return exact_tokens.hold_prompt(state, tap.k, tap.v, lengths, self._sinks(), self._recent(layout))

    def append(self, layout, bases, state, taps, counts, positions, place):
        return exact_tokens.append(state, taps.k, taps.v, counts)

    def refresh(self, layout, bases, state):
        return exact_tokens.flush(state, self._sinks(), self._recent(layout), layout.block)[0]


@register("sliding-window")
@dataclasses.dataclass(frozen=True)
class SlidingWindow(Windowed):
    """The last tokens only (window attention, the baseline of Xiao et al., 2023)."""

    def attend(self, layout, bases, state, q, positions, place):
        window = min(self._recent(layout), place.window or layout.capacity)
        return exact_tokens.attend(state, q, positions, scale=layout.spec.scale, window=window)


@register("streamingllm")
@dataclasses.dataclass(frozen=True)
class StreamingLLM(Windowed):
    """Attention sinks and a window of recent tokens (Xiao et al., 2023, "Efficient streaming language models").

    Attributes:
        sinks: first tokens that stay.
        positions: "cache", keys count by their index in the cache, as in the paper; "original" keeps the positions
            of the text.
    """

    sinks: int = 4
    positions: str = "cache"

    def __post_init__(self):
        if not isinstance(self.sinks, int) or self.sinks < 1:
            raise ValueError(f"sinks={self.sinks!r}: must be an int of at least 1 (sliding-window keeps none)")
        if self.positions not in ("cache", "original"):
            raise ValueError(f"positions={self.positions!r}: allowed are cache, original")
        super().__post_init__()

    def attend(self, layout, bases, state, q, positions, place):
        recent, scale = self._recent(layout), layout.spec.scale
        near = exact_tokens.part(state, self.sinks, state.k.shape[2])
        near = exact_tokens.attend(near, q, positions, scale=scale, window=min(recent, place.window or recent))
        window = place.window
        if self.positions == "cache" and layout.spec.rope is not None:
            # Logits depend on the distance only, and among recent tokens index and position differ by a constant: it
            # is enough to move the query nearer to the sinks.
            nearer = jnp.minimum(positions, self.sinks + recent - 1)
            q = rotate(q, *rope_angles(layout.spec.rope, (nearer - positions)[:, :, None]))
            positions = nearer
        first = exact_tokens.part(state, 0, self.sinks)
        return merge([exact_tokens.attend(first, q, positions, scale=scale, window=window), near])
