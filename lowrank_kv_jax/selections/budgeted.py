"""What the selections share that choose by scores: budgets and exact ends."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.method.selection import Selection

DEFAULT_KEEP = 0.25


@dataclasses.dataclass(frozen=True)
class Budgeted(Selection):
    """Abstract. Fields common to the rules that choose by scores.

    Attributes:
        budget: tokens that a kv head keeps, sinks and recent ones included.
        budget_bytes: instead: bytes of a row of the whole cache, statistics, positions and scores included. It is not
            exceeded, but where a codec's `smaller` gives layers widths that the others do not know of (`pyramidkv`).
        keep: instead: this fraction of the prompt's (padded) length, but never less than the exact ends. Without any
            of the three, a quarter; 1.0 keeps everything.
        sinks: first tokens that stay.
        recent: last tokens that stay.
        decoding: "evict", whatever exceeds the budget leaves at every refresh; "keep", only the prompt is compressed, and
            later tokens stay as they are; "code", later tokens stay too, coded as they leave the recent ones.
        positions: "original" positions in the text, or "cache": keys are turned to their index in the cache.
    """

    budget: int | None = None
    budget_bytes: int | None = None
    keep: float | None = None
    sinks: int = 0
    recent: int | None = 32
    decoding: str = "evict"
    positions: str = "original"

    exact_at: ClassVar[Mapping[str, Any] | None] = {"keep": 1.0, "sinks": 4, "recent": 8}
    small: ClassVar[Mapping[str, Any]] = {"budget": 24, "sinks": 4, "recent": 8}

    # where selections have these as fields, they stand behind the ones above
    decay: ClassVar[float] = 1.0
    schedule: ClassVar[str] = "block"
    prefill: ClassVar[str] = "literal"

    def __post_init__(self):
        given = [f for f in ("budget", "budget_bytes", "keep") if getattr(self, f) is not None]
        if len(given) > 1:
            raise ValueError(", ".join(f"{f}={getattr(self, f)!r}" for f in given) + ": give exactly one of them")
        for field, values in (("decoding", ("evict", "keep", "code")), ("positions", ("original", "cache"))):
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        for field, least in (("sinks", 0), ("recent", 0), ("budget", 1), ("budget_bytes", 1)):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in (0, 1]")
        ends = self.sinks + (self.recent or 0)
        if self.budget is not None and self.budget <= ends:
            raise ValueError(f"budget={self.budget!r}: must exceed sinks + recent = {self.sinks} + {self.recent or 0}")

    def tokens(self, layout):
        return kept_tokens(self.budget, self.keep, layout, self.sinks + (self.recent or 0) + 1)


def kept_tokens(budget: int | None, keep: float | None, layout: Layout, least: int) -> int:
    """Tokens that `budget` or `keep` stand for."""
    if budget is not None:
        return min(budget, layout.capacity)
    keep = DEFAULT_KEEP if keep is None else keep
    return layout.capacity if keep == 1 else max(round(keep * layout.prompt), least)
