"""How likely true answers are, beside what is answered."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from lowrank_kv_jax.evals.asking.clock import Clock
from lowrank_kv_jax.evals.perplexity.score import score_rows
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache


class Likelihoods:
    """Of the references of one question a row, where a row has one.

    Args:
        clock: of these questions; the time that this takes is none of its.
    """

    def __init__(self, method: Part, model: Any, clock: Clock, bases: Any):
        self._method, self._model, self._bases, self._clock = method, model, bases, clock
        self._references = [None if question is None else question.reference for question in clock.questions]
        self._nll: list[Any] = [None] * len(self._references)

    @property
    def asked(self) -> Callable[[Cache, jax.Array], None] | None:
        """The `on_asked` of `answer`; None where no likelihood is wanted."""
        return self._score if any(reference is not None for reference in self._references) else None

    def _score(self, cache: Cache, logits: jax.Array) -> None:
        jax.block_until_ready((cache, logits))  # what went before is the question's
        begin, tokenizer = time.perf_counter(), self._model.tokenizer
        rows = [[0] if text is None else list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
                for text in self._references]
        self._nll = [nll for nll, _ in score_rows(self._method, self._model, cache, logits, rows, bases=self._bases)]
        self._clock.begin += time.perf_counter() - begin

    def figures(self, row: int) -> dict[str, Any]:
        """What a record keeps of a row: the mean of the reference's tokens in nats, None if it is not finite."""
        if self._references[row] is None:
            return {}
        mean = float(self._nll[row].mean())
        return {"answer_nll": mean if math.isfinite(mean) else None, "answer_nll_tokens": len(self._nll[row])}
