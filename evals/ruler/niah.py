"""Needles in a haystack: the eight `niah_*` tasks."""

import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.ruler.haystack import NOISE, Essay
from lowrank_kv_jax.evals.ruler.sizing import count_tokens, draw, largest
from lowrank_kv_jax.evals.ruler.tasks import Task
from lowrank_kv_jax.evals.ruler.words import adjective_nouns

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40))]


def generate(
    task: Task, tokenizer: Any, length: int, samples: int, seed: int, essay: Essay
) -> Iterator[tuple[str, list[str], int]]:
    """Prompts with their references and tokens; the random stream is that of the official generator."""
    maker = _Maker(task, seed, essay)
    kind = task.parameters["haystack"]
    step = 500 if kind == "essay" else 5 if length < 4096 else 25

    def tokens(text: str) -> int:
        return count_tokens(tokenizer, text) + task.new_tokens

    per_piece = count_tokens(tokenizer, maker.make(step)[0]) / step
    upper = max(int(length / per_piece * 3), 2 * step)
    size = largest(step, upper, lambda pieces: tokens(maker.make(pieces)[0]), length)
    for _ in range(samples):
        yield draw(task.name, length, size, step, maker.make, tokens)


class _Maker:
    """Draws prompts one after the other from one random stream."""

    def __init__(self, task: Task, seed: int, essay: Essay):
        self.family, self.p = task.family, task.parameters
        self.seed, self.rng, self.essay = seed, random.Random(seed), essay
        self.singular = self.p["queries"] * self.p["values"] == 1

    def make(self, pieces: int) -> tuple[str, list[str]]:
        p, rng = self.p, self.rng
        keys: list[str] = []
        values: list[list[str]] = []
        needles: list[str] = []
        for _ in range(p["keys"]):
            keys.append(self._draw(p["key"]))
            values.append([])
            for _ in range(p["values"]):
                values[-1].append(self._draw(p["value"]))
                needles.append(self._needle(keys[-1], values[-1][-1]))
        random.Random(self.seed).shuffle(needles)
        hide = self._in_essay if p["haystack"] == "essay" else self._in_lines
        context = hide(needles, pieces)
        asked = rng.sample(range(p["keys"]), p["queries"])
        return self._prompt(context, [keys[i] for i in asked]), [value for i in asked for value in values[i]]

    def _draw(self, kind: str) -> str:
        if kind == "words":
            return self.rng.choice(adjective_nouns())
        if kind == "numbers":
            return str(self.rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.p["value"], key=key, value=value)

    def _in_essay(self, needles: Sequence[str], words: int) -> str:
        sentences = self.essay.sentences(self.essay.first(words).strip())
        depths = self.rng.sample(DEPTHS, len(needles))
        places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths)]
        parts = []
        for begin, end, needle in zip(places, places[1:], needles, strict=False):
            parts += [" ".join(sentences[begin:end]), needle]
        return " ".join([*parts, " ".join(sentences[places[-1] :])])

    def _in_lines(self, needles: Sequence[str], count: int) -> str:
        if self.p["haystack"] == "noise":
            lines = [NOISE] * count
        else:
            lines = [self._needle(self._draw(self.p["key"]), self._draw(self.p["value"]))
                     for _ in range(count)]
        places = sorted(self.rng.sample(range(count), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _prompt(self, context: str, keys: Sequence[str]) -> str:
        query = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
        template, values = self.family.prompt, self.p["value"]
        if self.singular:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            values = values[:-1]
        return template.format(type_needle_v=values, context=context, query=query)
