"""Scissorhands: tokens that were important stay important."""

import dataclasses
from typing import ClassVar

from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.votes import above_average, prompt_votes
from lowrank_kv_jax.selections.budgeted import Budgeted


@register("scissorhands")
@dataclasses.dataclass(frozen=True)
class Scissorhands(Budgeted):
    """Keeps the tokens that most queries of a history window gave more than average attention (Liu et al., 2023).

    Attributes:
        recent: last tokens that stay (10 in the paper).
        history: last queries of the prompt that count (400 in the paper).
        decay: share of the counts that survives a refresh, so that the window moves on while decoding.
    """

    recent: int | None = 10
    history: int = 400
    decay: float = 0.9

    by_votes: ClassVar[bool] = True
    counted: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.history, int) or self.history < 1:
            raise ValueError(f"history={self.history!r}: must be an int of at least 1")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay!r}: must lie in [0, 1]")

    @property
    def voters(self):
        return self.history

    def prompt_scores(self, layout, tap, lengths):
        return prompt_votes(
            tap.q, tap.k, lengths, above_average, self.history, sink_logits=tap.sink_logits, sliding=layout.window,
            **layout.spec.logits,
        )

    def vote(self, p, before):
        return above_average(p, before)
