"""What the methods share that select tokens by a rule: budgets, exact ends, and the hooks of the rule."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.methods.staged import Staged
from lowrank_kv_jax.selection.votes import total_attention
from lowrank_kv_jax.spec import Taps

DEFAULT_KEEP = 0.25


@dataclasses.dataclass(frozen=True)
class Selecting(Staged):
    """Abstract. Fields common to all rules.

    Attributes:
        budget: tokens that a kv head keeps, sinks and recent ones included.
        budget_bytes: instead: bytes of a row of the whole cache, statistics, positions and scores included.
        keep: instead: this fraction of the prompt's (padded) length, but never less than the exact ends. Without any
            of the three, a quarter; 1.0 keeps everything.
        sinks: first tokens that stay.
        recent: last tokens that stay.
        decoding: "evict", whatever exceeds the budget leaves at every refresh; "keep", only the prompt is compressed.
        positions: "original" positions in the text, or "cache": keys are turned to their index in the cache.
    """

    budget: int | None = None
    budget_bytes: int | None = None
    keep: float | None = None
    sinks: int = 0
    recent: int | None = 32
    decoding: str = "evict"
    positions: str = "original"

    stage: ClassVar[str | None] = "selection"
    keeps_none: ClassVar[bool] = False
    decay: ClassVar[float] = 1.0
    """Share of the votes that survives a refresh."""

    def __post_init__(self):
        given = [f for f in ("budget", "budget_bytes", "keep") if getattr(self, f) is not None]
        if len(given) > 1:
            raise ValueError(", ".join(f"{f}={getattr(self, f)!r}" for f in given) + ": give exactly one of them")
        for field, values in (("decoding", ("evict", "keep")), ("positions", ("original", "cache"))):
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        for field, least in (("sinks", 0), ("recent", 0), ("budget", 1), ("budget_bytes", 1)):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep!r}: must lie in (0, 1]")
        ends = self.sinks + (self.recent or 0)
        if self.budget is not None and self.budget < ends + (not self.keeps_none):
            raise ValueError(f"budget={self.budget!r}: must exceed sinks + recent = {self.sinks} + {self.recent or 0}")

    # ---- budgets ------------------------------------------------------------------------------------------------

    @property
    def adaptive(self) -> bool:
        """Whether heads have budgets of their own."""
        return False

    @property
    def layered(self) -> bool:
        """Whether layers have budgets of their own."""
        return False

    def tokens(self, layout: Layout) -> int:
        """Tokens that a kv head keeps; not asked where bytes decide."""
        if self.budget is not None:
            return min(self.budget, layout.capacity)
        keep = DEFAULT_KEEP if self.keep is None else self.keep
        if keep == 1:
            return layout.capacity
        return max(round(keep * layout.prompt), self.sinks + (self.recent or 0) + 1)

    def recent_tokens(self, layout: Layout) -> int:
        """Recent tokens that stay."""
        del layout
        return self.recent or 0

    def of_layer(self, tokens: int, room: int, bases: Any) -> int:
        """Selected tokens of one layer, of at most `room`, where every layer has `tokens` on average."""
        del room, bases
        return tokens

    def allocation_of(self, tokens: int, sinks: int, recent: int) -> tuple[int, float, str]:
        """floor, share and kind of `selection.adakv.head_budgets`; only asked of adaptive rules."""
        raise NotImplementedError(type(self).__name__)

    def check_prompt(self, layout: Layout) -> None:
        """Raise ValueError where a prompt is too short to select from."""

    # ---- scores -------------------------------------------------------------------------------------------------

    def selection_stage(self):
        return self

    def as_selection(self):
        """The rule as a stage of a composition."""
        return self

    @property
    def votes(self) -> bool:
        """Whether decoded queries vote."""
        return self.decoding == "evict"

    schedule: ClassVar[str] = "block"
    prefill: ClassVar[str] = "literal"
    statistics: ClassVar[str | None] = None
    """Order of the moment statistics that the rule itself reads, with or without a summary; None: none."""

    def prompt_scores(self, layout: Layout, tap: Taps, lengths: jax.Array) -> jax.Array:
        """Scores float32 `[B, K, S]` of the prompt's tokens, those beyond `lengths` zero; high ones stay."""
        raise NotImplementedError(type(self).__name__)

    def vote(self, p: jax.Array, positions: jax.Array) -> jax.Array:
        """Votes `[B, J, S]` of decoded queries from probabilities `[B, J, T, G, S]`."""
        return total_attention(p, positions)

    def informed(self, score: jax.Array, evicted, k, v, owner, scale: float) -> jax.Array:
        """The score in the light of `statistics`."""
        del evicted, k, v, owner, scale
        return score


@dataclasses.dataclass(frozen=True)
class RecentOnly(Selecting):
    """Sinks and recent tokens alone; the rest of the budget is recent."""

    sinks: int = 4
    recent: int | None = None
    keeps_none: ClassVar[bool] = True

    @property
    def votes(self) -> bool:
        return False

    def recent_tokens(self, layout):
        if self.budget_bytes is not None:
            raise ValueError(f"budget_bytes={self.budget_bytes}: a window counts tokens; give budget or keep")
        return max(self.tokens(layout) - self.sinks, 1)

    def prompt_scores(self, layout, tap, lengths):
        return jnp.zeros((layout.batch, layout.spec.kv_heads, layout.prompt), jnp.float32)
