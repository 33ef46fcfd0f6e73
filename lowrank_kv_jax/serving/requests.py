"""What is asked of an engine, and what comes of it."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from lowrank_kv_jax.checks.arrays import is_row
from lowrank_kv_jax.checks.bounds import check_int, is_int
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.generation.prompts import encode_prompts
from lowrank_kv_jax.generation.sampling import Sampler

MOST_STOPS = 8
"""Tokens that end a request, beside the model's end-of-sequence tokens."""
MOST_SEED = 2**32 - 1

Text = str | Sequence[int]
"""A text, or its ids."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how it is to be answered.

    Attributes:
        prompt: a text or ids.
        prefix: a text or ids before the prompt, compressed before the prompt is seen; requests of one prefix share it.
            The answer is that of `generate` to a second turn, `cache=` being the prefix's.
        shared: whether others are expected to have the same prefix, so that it is worth keeping.
        max_new_tokens: at most so many.
        temperature, top_k, top_p: see `Sampler`; the default is greedy.
        seed: of what is drawn.
        stop: tokens, or texts, that end the answer and are not part of it.
        stop_at_eos: end at the model's end-of-sequence tokens.
        on_tokens: called with the answer and its new tokens as soon as these are there: behind its prompt, and after each
            block.

    Raises:
        ValueError: a number out of range, stops that are neither tokens nor texts, too many of them.
    """

    prompt: Text
    prefix: Text | None = None
    shared: bool = True
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[int | str] = ()
    stop_at_eos: bool = True
    on_tokens: "Callable[[Answer, list[int]], None] | None" = None

    def __post_init__(self):
        check_int("max_new_tokens", self.max_new_tokens, 1)
        Sampler(self.temperature, self.top_k, self.top_p)
        check_int("seed", self.seed, 0, MOST_SEED)
        stops = self.stop
        if not is_row(stops) or not all(isinstance(stop, str) and stop or is_int(stop) for stop in stops):
            raise ValueError(f"stop={short(stops)}: must be a list of tokens, or of texts that are not empty")
        if len(stops) > MOST_STOPS:
            raise ValueError(f"stop={short(stops)}: must be at most {MOST_STOPS} tokens and texts")
        if self.on_tokens is not None and not callable(self.on_tokens):
            raise ValueError(f"on_tokens={short(self.on_tokens)}: must be callable, or None")


class Answer:
    """What an engine has answered so far; made by `Engine.submit`.

    Attributes:
        request: what was asked.
        prefix, prompt: its ids; a prefix of none is empty.
        tokens: drawn so far; a token that ends the answer is left out, those of a text that does are only cut off `text`.
        finish: None while it goes on; "stop", "length" (`max_new_tokens` are drawn), "cancelled" or "fault".
        error: what is wrong, of a fault.
        submitted_s, first_s, finished_s: `time.perf_counter()` when it was submitted, at its first token, at its end; NaN
            before.
    """

    def __init__(self, model: Any, request: Request):
        self._model = model
        prefix, opening = (), request.prefix is None
        if not opening:
            (prefix,) = encode_prompts(model, [request.prefix], one="prefix")
        (prompt,) = encode_prompts(model, [request.prompt], opening=opening, one="prompt")
        self.request, self.prompt, self.prefix = request, tuple(prompt), tuple(prefix)
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.error: str | None = None
        self.submitted_s, self.first_s, self.finished_s = time.perf_counter(), math.nan, math.nan
        self._cut: str | None = None
        vocabulary, eos = model.config.vocab_size, model.config.eos_ids if request.stop_at_eos else ()
        tokens = [int(stop) for stop in request.stop if not isinstance(stop, str)]
        wrong = [stop for stop in tokens if not 0 <= stop < vocabulary]
        if wrong:
            raise ValueError(f"stop holds id {short(wrong[0])}: ids lie in 0..{vocabulary - 1}")
        self.stops = (*eos, *tokens)
        self._texts = tuple(stop for stop in request.stop if isinstance(stop, str))
        if self._texts and model.tokenizer is None:
            raise ValueError("this model has no tokenizer: give stop as ids")

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def text(self) -> str | None:
        """Of its tokens, up to a text that ended it; None without a tokenizer."""
        if self._cut is not None or self._model.tokenizer is None:
            return self._cut
        return self._model.tokenizer.decode(self.tokens)

    def cancel(self) -> None:
        """End it; its row is free from the next step on. One that is done stays as it is."""
        self.end("cancelled")

    def end(self, finish: str, error: str | None = None) -> None:
        """For the engine: it has ended so."""
        if not self.done:
            self.finish, self.error, self.finished_s = finish, error, time.perf_counter()

    def take(self, tokens: Sequence[int]) -> list[int]:
        """For the engine: add what was drawn, and end at what ends it; what is new to it."""
        if len(tokens) and math.isnan(self.first_s):
            self.first_s = time.perf_counter()
        stop = next((at for at, token in enumerate(tokens) if token in self.stops), None)
        left = self.request.max_new_tokens - len(self.tokens)
        new = [int(token) for token in tokens[:stop][:left]]
        length, cut = len(new) == left, self._until_a_text(new)
        self.tokens += new[:cut]
        if cut is not None or length or stop is not None:
            self.end("length" if cut is None and length else "stop")
        return new[:cut]

    def _until_a_text(self, new: list[int]) -> int | None:
        """After how many of the new tokens a text ends the answer, which is then cut; None where none does.

        Texts are decoded whole, token by token only where one is found: what a token adds depends on those before it.
        """
        if not self._texts or self._found(new) is None:
            return None
        for count in range(1, len(new) + 1):
            if (text := self._found(new[:count])) is not None:
                self._cut = text
                return count
        return None

    def _found(self, new: list[int]) -> str | None:
        """The answer with new tokens, up to the first text that ends it; None where none does."""
        text = self._model.tokenizer.decode(self.tokens + new)
        found = [at for at in map(text.find, self._texts) if at >= 0]
        return text[: min(found)] if found else None
