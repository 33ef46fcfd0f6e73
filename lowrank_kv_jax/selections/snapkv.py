"""SnapKV: the prompt's last queries choose."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.neighbours import Neighbours
from lowrank_kv_jax.selections.budgeted import Budgeted
from lowrank_kv_jax.selections.window_scores import GROUPS, POOLS, chunked, window_scores


@dataclasses.dataclass(frozen=True)
class Windowing(Budgeted):
    """Abstract. Rules by an observation window, `recent` tokens that stay and vote.

    While decoding, the queries since the last refresh are the observation window.

    Attributes:
        window: how many last queries vote; None: the `recent` ones.
        pool, kernel: "avg", "max" or "none" over `kernel` neighbours.
        group: aggregate the query heads of a kv head "after" or "before" pooling.
        decay: share of the earlier votes that survives a refresh; 0 looks at the last block alone.
    """

    window: int | None = None
    pool: str = "avg"
    kernel: int = 5
    group: str = "after"
    decay: float = 0.9

    chunk: ClassVar[int] = 1
    """Adjacent tokens of the prompt that share a score; a field of selections that have it."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"recent": 32, "pool": "avg", "kernel": 5, "decoding": "keep"},
        "longbench": {"recent": 32, "pool": "max", "kernel": 7, "decoding": "keep"},
        "kvpress": {"recent": 64, "pool": "avg", "kernel": 5, "decoding": "keep"},
        "kvcache-factory": {"recent": 8, "pool": "max", "kernel": 7, "group": "before", "decoding": "keep"},
    }

    def __post_init__(self):
        super().__post_init__()
        for field, values in (("pool", POOLS), ("group", GROUPS)):
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        for field in ("kernel", "window"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field}={value!r}: must be an int of at least 1")
        if self.window is None and not self.recent:
            raise ValueError(f"recent={self.recent!r}, window=None: the observation window is empty; give window")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay!r}: must lie in [0, 1]")

    @property
    def voters(self) -> int:
        """Length of the observation window."""
        return self.window if self.window is not None else self.recent or 0

    by_votes: ClassVar[bool] = True

    @property
    def neighbours(self):
        return Neighbours(self.pool, self.kernel, self.chunk)

    def prompt_scores(self, layout, tap, lengths):
        scores = window_scores(
            tap.q, tap.k, lengths, window=self.voters, excluded=self.recent or 0, pool=self.pool, kernel=self.kernel,
            group=self.group, sink_logits=tap.sink_logits, sliding=layout.window, **layout.spec.logits,
        )
        return chunked(scores, self.chunk)


@register("snapkv")
@dataclasses.dataclass(frozen=True)
class SnapKV(Windowing):
    """The same number of tokens for every head (Li et al., 2024)."""
