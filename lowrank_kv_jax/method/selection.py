"""The contract of a selection: which tokens stay between the exact ends, by scores and budgets."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Float32, Int

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.method.neighbours import Neighbours
from lowrank_kv_jax.method.part import Part
from lowrank_kv_jax.method.votes import total_attention
from lowrank_kv_jax.summaries.component import Summary


@dataclasses.dataclass(frozen=True)
class Selection(Part):
    """Abstract. Scores and budgets; what is a plain attribute here may be a field of a selection."""

    stage: ClassVar[str | None] = "selection"

    # no annotations: a field of the same name keeps its place among those of its class
    sinks = 0
    """First tokens that stay."""

    recent = 0
    """Last tokens that stay; None is a rule's own choice, see `recent_tokens`."""

    budget_bytes = None
    """Bytes of a row of the whole cache, which decide how many tokens stay; None: `tokens` does."""

    decoding = "evict"
    """"evict", whatever exceeds the budget leaves at every refresh; "keep", only the prompt is compressed, and later
    tokens stay as they are; "code", later tokens stay too, coded as they leave the recent ones."""

    positions = "original"
    """"original" positions in the text, or "cache": keys are turned to their index in the cache."""

    keeps_none: ClassVar[bool] = False
    """Whether nothing stays between sinks and recent tokens."""

    adaptive: ClassVar[bool] = False
    """Whether heads have budgets of their own, by `allocation` and `alpha`."""

    allocation = "uniform"
    """How heads share a layer's budget, see `method.head_budgets`; only read of adaptive rules."""

    alpha = 0.0
    """Share of the budget that every head is sure of."""

    heads_by = "informed"
    """What heads' budgets follow where `statistics` weigh the scores: "informed", these; "attention", the votes alone."""

    by_votes: ClassVar[bool] = False
    """Whether `prompt_scores` are votes of the prompt's queries: of a prompt in chunks each chunk's queries then `vote`
    for what the cache holds, too. Otherwise every chunk is scored by itself, and its tokens' scores stay."""

    counted: ClassVar[bool] = False
    """Whether `vote` is `above_average`, and not `total_attention`. A `vote` beside which it is not said is XLA's."""

    voters = None
    """Last queries of a prompt that vote; None: all of them."""

    neighbours: ClassVar[Neighbours | None] = None
    """How neighbours share the votes of a prompt that comes in chunks; None: they do not."""

    decay = 1.0
    """Share of the votes that survives a refresh."""

    schedule = "block"
    """"block" evicts at every refresh; "paper" one token a head for each decoded token, before it attends."""

    prefill = "literal"
    """What `statistics` of a prompt's first eviction are: "literal", of nothing; "informed", of all candidates."""

    statistics: ClassVar[Summary | None] = None
    """Moments of the evicted by whose residuals scores are weighed (`summaries.residuals`), with or without
    a summary; None: they are not."""

    summary: ClassVar[Summary | None] = None
    """The summary of what it evicts that belongs to the rule itself."""

    # ---- budgets ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def tokens(self, layout: Layout) -> int:
        """Tokens that a kv head keeps, the exact ends included; not asked where bytes decide."""

    def recent_tokens(self, layout: Layout) -> int:
        """Last tokens that stay. Default: `recent`."""
        del layout
        return self.recent or 0

    def of_layer(self, tokens: int, room: int, bases: Any) -> int:
        """Selected tokens of one layer, of at most `room`, where every layer has `tokens` on average."""
        del room, bases
        return tokens

    # ---- scores -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def prompt_scores(self, layout: Layout, tap: Taps, lengths: Int[jax.Array, " B"]) -> Float32[jax.Array, "B K S"]:
        """Scores float32 `[B, K, S]` of the prompt's tokens, those beyond `lengths` zero; high ones stay."""

    def vote(
        self, p: Float32[jax.Array, "B J T G S"], before: Int[jax.Array, "B T"]
    ) -> Float32[jax.Array, "B J S"]:
        """Votes `[B, J, S]` of decoded queries from probabilities `[B, J, T, G, S]`; `before`: how many tokens before
        itself each sees."""
        return total_attention(p, before)
