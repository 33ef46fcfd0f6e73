"""Contexts with several needles, for several questions on one cache."""

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowrank_kv_jax.evals.needle.samples import ADJECTIVES, ANSWER_PREFIX, INSTRUCTION, NEEDLE, NOISE, NOUNS, QUESTION

MOST_NEEDLES = len(ADJECTIVES) * len(NOUNS)
"""Of a context: as many names as there are."""


class Needle(NamedTuple):
    """A question on a context.

    Attributes:
        question: ends behind its mark.
        prefix: what the answer starts with; follows the question directly.
        value: what a right answer holds.
        depth: where in the haystack it lies, 0 first and 1 last.
    """

    question: str
    prefix: str
    value: str
    depth: float


class Context(NamedTuple):
    """A haystack and what is hidden in it, in the order in which it is asked."""

    text: str
    needles: tuple[Needle, ...]


def make_context(
    tokenizer: Any, length: int, needles: int, seed: int, index: int, sentences: Sequence[str] | None = None
) -> Context:
    """The context `index` of a seed, as long as fits.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        length: its tokens, at most.
        needles: hidden at random depths.
        seed, index: everything random follows from these two, from `length` and from `needles`.
        sentences: of the haystack, from the beginning again where they end; by default RULER's noise.

    Raises:
        ValueError: not even the needles fit.
    """
    rng = random.Random(f"retention {seed} {length} {needles} {index}")
    names = rng.sample([f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS], needles)
    values = [str(rng.randint(10**6, 10**7 - 1)) for _ in names]
    depths = [rng.random() for _ in names]
    hay = [NOISE] if sentences is None else sentences
    hidden = [NEEDLE.format(key=name, value=value) for name, value in zip(names, values, strict=True)]

    def text(count: int) -> str:
        lines = [hay[i % len(hay)] for i in range(count)]
        places = [math.floor(depth * count) for depth in depths]
        for place, needle in sorted(zip(places, hidden, strict=True), reverse=True):
            lines.insert(place, needle)
        return "\n".join([INSTRUCTION, *lines, ""])

    count = _most(lambda count: len(tokenizer(text(count), verbose=False).input_ids), length)
    return Context(text(count), tuple(
        Needle(QUESTION.format(key=name), ANSWER_PREFIX.format(key=name), value, depth)
        for name, value, depth in zip(names, values, depths, strict=True)
    ))


def _most(tokens: Any, length: int) -> int:
    """The most sentences that take at most `length` tokens."""
    if (least := tokens(0)) > length:
        raise ValueError(f"length={length}: must be at least {least}, the needles alone take so many tokens")
    low, high = 0, 1
    while tokens(high) <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle)
    return low
