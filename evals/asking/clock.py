"""How long a prefill took that methods share, when an answer is long enough, and how long a batch of them took."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lowrank_kv_jax.evals.asking.prompts import Question


class PrefillClock:
    """Seconds of a prefill: of the layers, which methods share, and of what each method does on its own.

    Attributes:
        shared: of the layers.
        own: by method.
    """

    def __init__(self):
        self.shared, self.own = 0.0, defaultdict(float)

    @contextlib.contextmanager
    def layer(self) -> Iterator[None]:
        """Adds what runs inside to `shared`; it must be finished there, not only dispatched."""
        begin = time.perf_counter()
        yield
        self.shared += time.perf_counter() - begin

    @contextlib.contextmanager
    def method(self, name: str) -> Iterator[None]:
        """Adds what runs inside to a method's own seconds."""
        begin = time.perf_counter()
        yield
        self.own[name] += time.perf_counter() - begin

    def alone(self, name: str) -> float:
        """What the prefill would have taken for this method alone."""
        return self.shared + self.own[name]


class Clock:
    """Ends the rows of a batch, and times it.

    Attributes:
        tokens: drawn for each row.
    """

    def __init__(self, questions: Sequence[Question | None], tokenizer: Any):
        self.questions, self.tokenizer, self.tokens = questions, tokenizer, [0] * len(questions)
        self.begin, self.first, self.last, self.drawn = time.perf_counter(), None, None, 0
        self.stopped = False

    def enough(self, row: int, ids: Sequence[int]) -> bool:
        """Whether a row's answer ends here: it is as long as it may be, or its score cannot change any
        more."""
        question, now = self.questions[row], time.perf_counter()
        if question is None:
            return True
        self.tokens[row] += 1
        if not self.stopped:
            self.first = now if self.first is None else self.first
            self.last = now
            self.drawn += 1
        text = self.tokenizer.decode(list(ids), skip_special_tokens=not question.special)
        return self.tokens[row] >= question.new_tokens or question.complete(text)

    def stop(self) -> None:
        """Take no more times: what follows is a smaller batch, whose programs may have to be compiled first."""
        self.stopped = True

    def times(self, prefill_s: float | None) -> dict[str, float | None]:
        """Of the whole batch while most of it is at work; None where programs were compiled meanwhile or no token was
        drawn.

        Args:
            prefill_s: of this batch for its method alone; None if unknown.
        """
        if prefill_s is None or self.first is None or self.last is None:
            return {"ttft_s": None, "decode_tokens_per_s": None}
        drawn, seconds = self.drawn - sum(n > 0 for n in self.tokens), self.last - self.first
        return {
            "ttft_s": prefill_s + self.first - self.begin,
            "decode_tokens_per_s": drawn / seconds if drawn > 0 and seconds > 0 else None,
        }
