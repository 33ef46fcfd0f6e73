"""H2O: heavy hitters, the tokens with most attention so far, and recent ones."""

import dataclasses
from typing import ClassVar

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.votes import prompt_votes, total_attention
from lowrank_kv_jax.selections.budgeted import Budgeted


@register("h2o")
@dataclasses.dataclass(frozen=True)
class H2O(Budgeted):
    """Accumulated attention over all past queries, of the prompt and while decoding (Zhang et al., 2023).

    Attributes:
        recent: half of the budget by default.
    """

    recent: int | None = None

    by_votes: ClassVar[bool] = True

    def recent_tokens(self, layout):
        if self.recent is not None:
            return self.recent
        if self.budget_bytes is not None:
            raise ValueError(f"budget_bytes={self.budget_bytes}: give recent too; its default is half of a token budget")
        return max(min(self.tokens(layout) // 2, layout.capacity // 2), 1)

    def prompt_scores(self, layout, tap, lengths):
        return prompt_votes(
            tap.q, tap.k, lengths, total_attention, sink_logits=tap.sink_logits, sliding=layout.window,
            **layout.spec.logits,
        )
