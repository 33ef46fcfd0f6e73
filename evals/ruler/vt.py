"""Variable tracking: a chain of assignments scattered over the noise."""

import random
import string
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.ruler.haystack import NOISE
from lowrank_kv_jax.evals.ruler.sizing import TooShort, count_tokens, draw, largest
from lowrank_kv_jax.evals.ruler.tasks import Task

EXAMPLE_LENGTH = 500
"""Tokens of the worked example in front of each sample, at most."""

EXAMPLE_VALUE = "12345"


def generate(
    task: Task, tokenizer: Any, length: int, samples: int, seed: int
) -> Iterator[tuple[str, list[str], int]]:
    """Prompts with their references and tokens; the random streams are those of the official generator."""
    maker = _Maker(task, seed)

    def sized(limit: int, step: int, extra: int, example: bool) -> int:
        per_line = count_tokens(tokenizer, maker.make(step, example)[0]) / step
        upper = max(int(limit / per_line * 3), 2 * step)
        return largest(step, upper, lambda n: count_tokens(tokenizer, maker.make(n, example)[0]) + extra,
                       limit)

    size = sized(EXAMPLE_LENGTH, 5, 0, True)
    try:
        text, outputs, _ = draw(
            task.name, EXAMPLE_LENGTH, size, 5, lambda n: maker.make(n, True),
            lambda text: count_tokens(tokenizer, text)
        )
    except TooShort as error:
        raise TooShort(f"RULER task {task.name!r}: its worked example has at most {EXAMPLE_LENGTH} tokens at any length, "
                       "and the shortest takes more with this tokenizer") from error
    example = f"{text} {' '.join(outputs)}\n"
    step = 5 if length < 4096 else 10
    size = sized(length, step, count_tokens(tokenizer, example) + task.new_tokens, False)

    def with_example(lines: int) -> tuple[str, list[str]]:
        text, outputs = maker.make(lines, False)
        return maker.renamed(example) + "\n" + text, outputs

    for _ in range(samples):
        yield draw(task.name, length, size, step, with_example,
                   lambda text: count_tokens(tokenizer, text) + task.new_tokens)


class _Maker:
    """Draws chains and examples; names come from one stream, values from another."""

    def __init__(self, task: Task, seed: int):
        self.family, self.chains, self.hops = task.family, task.parameters["chains"], task.parameters["hops"]
        self.rng, self.values = random.Random(seed), np.random.RandomState(seed)

    def make(self, lines: int, example: bool) -> tuple[str, list[str]]:
        """A prompt over so many lines of noise, and the variables of its first chain; examples have short
        names."""
        names, chains = self._chains(example)
        value = chains[0][0].split("=")[-1].strip()
        sentences = [NOISE] * lines
        for chain in chains:
            places = sorted(self.rng.sample(range(len(sentences)), len(chain)))
            for offset, (place, statement) in enumerate(zip(places, chain, strict=True)):
                sentences.insert(place + offset, statement)
        context = "\n".join(sentences).replace(". \n", ".\n")
        return self.family.prompt.format(context=context, query=value, num_v=self.hops + 1), names[0]

    def renamed(self, example: str) -> str:
        """The example with new names and a new value."""
        for name in example.strip().split()[-self.hops - 1 :]:
            example = example.replace(name, self._name(len(name)))
        return example.replace(EXAMPLE_VALUE, self._value())

    def _chains(self, example: bool) -> tuple[list[list[str]], list[list[str]]]:
        width, per_chain = 3 if example else 5, self.hops + 1
        pool = [self._name(width) for _ in range(per_chain * self.chains)]
        while len(set(pool)) < per_chain * self.chains:
            pool.append(self._name(width))
        names, chains = [], []
        for begin in range(0, len(pool), per_chain):
            here = pool[begin : begin + per_chain]
            names.append(here)
            first = f"VAR {here[0]} = {EXAMPLE_VALUE if example else self._value()}"
            links = zip(here, here[1:], strict=False)
            chains.append([first, *(f"VAR {new} = VAR {old} " for old, new in links)])
        return names, chains

    def _name(self, width: int) -> str:
        return "".join(self.rng.choices(string.ascii_uppercase, k=width))

    def _value(self) -> str:
        return str(self.values.randint(10000, 99999))
