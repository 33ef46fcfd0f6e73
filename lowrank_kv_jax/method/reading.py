"""The contract of a reading: all tokens stay, and each step reads the pages of them that its queries need."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Float, Float32, Int

from lowrank_kv_jax.method.layout import Layout
from lowrank_kv_jax.method.part import Part


@dataclasses.dataclass(frozen=True)
class Reading(Part):
    """Abstract. Pages of stored tokens, each known by its marks; for every codec of one token at a time.

    The page of the last stored tokens is always among those that are read.
    """

    stage: ClassVar[str | None] = "reading"

    # no annotations: a field of the same name keeps its place among those of its class
    sinks = 0
    """First tokens that stay exact, where the codec has no ends of its own."""

    recent = 0
    """Last tokens that do."""

    page = 16
    """Tokens of a page."""

    dense_layers = 0
    """First layers of a model that read everything."""

    together = "sum"
    """How the wishes of query heads that share pages are put together, their softmax over the pages: "sum" or "max"."""

    @abc.abstractmethod
    def pages(self, layout: Layout, there: int) -> int:
        """How many of `there` pages a step reads."""

    @abc.abstractmethod
    def empty(self, layout: Layout, pages: int) -> Any:
        """Marks of one layer without a token, a state with axes `[B, K, C, ...]`, C pages."""

    @abc.abstractmethod
    def add(
        self, marks: Any, k: Float[jax.Array, "B T K D"], start: Int[jax.Array, " B"], counts: Int[jax.Array, " B"]
    ) -> Any:
        """Marks with the first `counts[b]` of T more tokens.

        Args:
            k: keys after RoPE `[B, T, K, D]`.
            start: int32 `[B]`, tokens stored before them.
        """

    @abc.abstractmethod
    def logits(self, marks: Any, q: Float[jax.Array, "B K M D"]) -> Float32[jax.Array, "B K M C"]:
        """What the logits of a page's tokens are taken to be: float32 `[B, K, M, C]` of queries `[B, K, M, D]`."""
