"""Sinks and recent tokens alone: StreamingLLM and the sliding window."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.selections.budgeted import kept_tokens


@dataclasses.dataclass(frozen=True)
class RecentOnly(Selection):
    """Abstract. Nothing stays between the sinks and the recent tokens, which are the rest of the budget.

    Alone, a query never sees more than these; before a summary, tokens leave at a refresh.

    Attributes:
        budget: tokens kept in all, the sinks included.
        keep: instead of `budget`: this fraction of the prompt's (padded) length; a quarter where neither is given, and
            1.0 is everything.
    """

    budget: int | None = None
    keep: float | None = None

    exact_at: ClassVar[Mapping[str, Any] | None] = {"keep": 1.0}
    small: ClassVar[Mapping[str, Any]] = {"budget": 24}
    keeps_none: ClassVar[bool] = True

    def __post_init__(self):
        if self.budget is not None and self.keep is not None:
            raise ValueError(f"budget={self.budget!r}, keep={self.keep!r}: give one of them, not both")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in (0, 1]")
        if self.budget is not None and self.budget <= self.sinks:
            raise ValueError(f"budget={self.budget!r}: must exceed the {self.sinks} sinks")

    def tokens(self, layout):
        return kept_tokens(self.budget, self.keep, layout, self.sinks + 1)

    def recent_tokens(self, layout):
        return max(self.tokens(layout) - self.sinks, 1)

    def prompt_scores(self, layout, tap, lengths):
        return jnp.zeros((layout.batch, layout.spec.kv_heads, tap.k.shape[1]), jnp.float32)


@register("sliding-window")
@dataclasses.dataclass(frozen=True)
class SlidingWindow(RecentOnly):
    """The last tokens only (window attention, the baseline of Xiao et al., 2023)."""


@register("streamingllm")
@dataclasses.dataclass(frozen=True)
class StreamingLLM(RecentOnly):
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
