"""Frequent words: the three most frequent of coded words whose counts follow a zeta distribution."""

import random
import string
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import zeta

from lowrank_kv_jax.evals.ruler.sizing import TooShort, count_tokens
from lowrank_kv_jax.evals.ruler.tasks import Task

TOKENS_PER_WORD = 50  # the vocabulary has one word for so many tokens
STEPS = 32  # the text grows and shrinks by this part of its length
ANSWERS = 3


def generate(
    task: Task, tokenizer: Any, length: int, samples: int, seed: int
) -> Iterator[tuple[str, list[str], int]]:
    """Prompts with their references and tokens; the random stream is that of the official generator."""
    rng, width, alpha = random.Random(seed), task.parameters["word_length"], task.parameters["alpha"]
    limit = length - task.new_tokens
    vocabulary, step = limit // TOKENS_PER_WORD, limit // STEPS
    if vocabulary <= ANSWERS or step < 1:
        least = TOKENS_PER_WORD * (ANSWERS + 1) + task.new_tokens
        raise TooShort(f"length={length} is below the floor of RULER task {task.name!r}: {least} tokens")

    def draw_words() -> list[str]:
        words = ["".join(rng.choices(string.ascii_lowercase, k=width)) for _ in range(vocabulary)]
        while len(set(words)) < vocabulary:
            words.append("".join(rng.choices(string.ascii_lowercase, k=width)))
        words = sorted(set(words))
        random.Random(seed).shuffle(words)
        return ["...", *words[1:]]  # the most frequent word is noise

    def prompt(words: list[str], total: int) -> str:
        if total <= 0:
            raise TooShort(f"length={length} is below the floor of RULER task {task.name!r}: no word fits")
        rank = np.arange(1, len(words) + 1)
        counts = (total * rank**-alpha / zeta(alpha)).astype(int)
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        random.Random(seed).shuffle(text)
        return task.family.prompt.format(context=" ".join(text))

    total, words = limit // width, draw_words()
    while count_tokens(tokenizer, prompt(words, total)) < limit:
        total += step
    total -= step
    for _ in range(samples):
        words, here = draw_words(), total
        while (tokens := count_tokens(tokenizer, text := prompt(words, here))) > limit:
            here -= step
        yield text, words[1 : ANSWERS + 1], tokens + task.new_tokens
