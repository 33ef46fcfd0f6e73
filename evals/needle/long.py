"""RULER's needles in contexts that are as long as was asked for, for what is compared at equal bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.ruler.run import draw_samples, question_of
from lowrank_kv_jax.evals.ruler.samples import RulerSample
from lowrank_kv_jax.evals.ruler.sizing import count_tokens

NEW_TOKENS = {"niah_single_1": 24, "niah_single_2": 24, "niah_multikey_1": 24, "niah_multivalue": 56}
"""Needle tasks of RULER, and tokens of an answer: a number of seven digits takes eight."""

LEAST = 0.75
"""Of the length that was asked for, the context of a needle."""

DRAWN = (4, 16)
"""Samples drawn for each one that is wanted, at first and at most: of prompts of 1,024 tokens one in eight of
`niah_multivalue` is long enough. The first samples are the same, however many are drawn."""


def long_needles(
    tokenizer: Any, tasks: Sequence[str], length: int, samples: int, seed: int, *, least: float = LEAST,
    haystack: str | None = None,
) -> tuple[Question, ...]:
    """Needles as RULER makes them, answers cut to what the numbers take.

    The official generator shortens essays by 500 words until they fit: samples of less than `least` of the length are
    left out, since a ratio of bytes means nothing for them.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        tasks: of `NEW_TOKENS`.
        length: tokens of a prompt with the 128 that RULER reserves for its answer, at most.
        samples: of each task.
        haystack: of the essay tasks, see `load_haystack`.

    Raises:
        ValueError: a task that is not listed here, or too few samples are long enough.
    """
    for task in tasks:
        if task not in NEW_TOKENS:
            raise ValueError(f"task={task!r}: allowed are {', '.join(NEW_TOKENS)}")
    return tuple(
        question_of(sample, length, NEW_TOKENS[task])
        for task in tasks for sample in _long(tokenizer, task, length, samples, seed, least * length, haystack)
    )


def _long(tokenizer, task: str, length: int, samples: int, seed: int, least: float, haystack) -> list[RulerSample]:
    """The first samples of a task with contexts of `least` tokens or more."""
    for drawn in DRAWN:
        tried, _ = draw_samples(tokenizer, (task,), (length,), drawn * samples, seed, haystack)
        long = [sample for _, sample in tried if count_tokens(tokenizer, sample.context) >= least]
        if len(long) >= samples:
            return long[:samples]
    raise ValueError(f"samples={samples}: only {len(long)} of {task} are about {length} tokens long")


def found_by_task(records: Sequence[Mapping[str, Any]], method: str) -> dict[str, list[float]]:
    """Scores of a method's records, 0 to 100, by task."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record["method"] == method:
            found.setdefault(record["task"], []).append(record["score"])
    return found
