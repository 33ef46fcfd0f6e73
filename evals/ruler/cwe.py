"""Common words: the ten words of a list that stand in it more often than the others."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from lowrank_kv_jax.evals.ruler.sizing import count_tokens, draw, largest
from lowrank_kv_jax.evals.ruler.tasks import Task
from lowrank_kv_jax.evals.ruler.words import adjective_nouns, all_words

STEP = 10
TRIAL = 4096  # words of the list from which the tokens of a word are estimated
SHORT = 4096  # below this length words are repeated less often, and the worked example is shorter


def generate(
    task: Task, tokenizer: Any, length: int, samples: int, seed: int, more_words: Sequence[str] | None = None
) -> Iterator[tuple[str, list[str], int]]:
    """Prompts with their references and tokens; the random stream is that of the official generator.

    Args:
        more_words: drawn from where a list has more different words than wonderwords knows (beyond about 100K
            tokens); by default pairs of its adjectives and nouns.
    """
    maker = _Maker(task, length, seed, more_words)

    def tokens(text: str) -> int:
        return count_tokens(tokenizer, text) + task.new_tokens

    per_word = count_tokens(tokenizer, maker.make(TRIAL)[0]) / TRIAL
    upper = max(int(length // per_word) * 2, 2 * STEP)
    size = largest(STEP, upper, lambda words: tokens(maker.make(words)[0]), length)
    for _ in range(samples):
        yield draw(task.name, length, size, STEP, maker.make, tokens)


class _Maker:
    def __init__(self, task: Task, length: int, seed: int, more_words: Sequence[str] | None):
        self.family, self.common, self.seed = task.family, task.parameters["common"], seed
        repeats = task.parameters["common_repeats"], task.parameters["uncommon_repeats"]
        self.repeats, self.example = ((6, 1), (20, 3, 1)) if length < SHORT else (repeats, (40, 10, 3))
        self.words = list(all_words())
        random.Random(seed).shuffle(self.words)
        self.more_words = more_words
        self.rng = random.Random(seed)

    def make(self, words: int) -> tuple[str, list[str]]:
        """A worked example and a prompt with so many different words; the common ones are the references."""
        shown, answer = self._list(*self.example)
        example = f"{self._prompt(shown)} {_numbered(answer)}"
        shown, answer = self._list(words, *self.repeats)
        return f"{example}\n{self._prompt(shown)}", answer

    def _prompt(self, shown: str) -> str:
        return self.family.prompt.format(context=shown)

    def _list(self, words: int, common_repeats: int, uncommon_repeats: int) -> tuple[str, list[str]]:
        pool = self.words
        if words > len(pool):
            pool = self.more_words if self.more_words is not None else adjective_nouns()
        drawn = self.rng.sample(pool, words)
        common, uncommon = drawn[: self.common], drawn[self.common :]
        entries = common * common_repeats + uncommon * uncommon_repeats
        random.Random(self.seed).shuffle(entries)
        return _numbered(entries), common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
