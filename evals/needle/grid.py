"""A single needle at every depth of contexts of several lengths: what a heat map is drawn from."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate_calibrated
from lowrank_kv_jax.evals.needle.samples import TASK, make_needle, substring_score
from lowrank_kv_jax.method import Part

COMMAND = "eval needle"
NEW_TOKENS = 32


def evaluate_needles(
    model: Any, methods: Mapping[str, Part], lengths: Sequence[int] = (512, 1024, 2048), depths: int = 5,
    samples: int = 2, protocol: str = "query-agnostic", seed: int = 0, *,
    json: str | os.PathLike | None = None, style: str = "base", rows: int = 5, dtype: str | None = None,
    calibrate: Corpus | None = None, progress: bool = False, mesh: Any = None,
    prefill_chunk: int | None = None,
) -> list[dict[str, Any]]:
    """Score methods on needles in noise.

    Args:
        lengths: in tokens, the answer included.
        depths: how many, evenly spaced from the beginning (0) to the end (1) of the context.
        samples: needles at each length and depth.

    The other arguments are those of `evaluate_ruler`.

    Returns:
        One record for each needle and method, with its `depth`.

    Raises:
        ValueError: less than two depths or one sample, and as `make_needle` and `evaluate`.
    """
    if depths < 2 or samples < 1:
        raise ValueError(f"depths={depths}, samples={samples}: must be at least 2 and 1")
    asked = tuple(
        make_question(model.tokenizer, length, seed, place * samples + i, place / (depths - 1))
        for length in lengths for place in range(depths) for i in range(samples)
    )
    settings = {"depths": depths, "samples_per_depth": samples}
    suite = Suite(COMMAND, asked, protocol, style, seed, rows, dtype, settings, prefill_chunk)
    return evaluate_calibrated(model, methods, suite, calibrate, json=json, progress=progress, mesh=mesh)


def make_question(
    tokenizer: Any, length: int, seed: int, index: int, depth: float | None = None, *, new_tokens: int = NEW_TOKENS,
    reserve: int = NEW_TOKENS,
) -> Question:
    """The needle `index` of a seed; `depth` and `reserve` are those of `make_needle`."""
    sample = make_needle(tokenizer, length, seed, index, depth, reserve)
    question, mark, prefix = sample.question.partition("?")

    def score(answer: str) -> float:
        return substring_score(answer, sample.outputs)

    return Question(
        TASK, length, index, sample.context, question + mark, prefix, new_tokens, score,
        lambda answer: score(answer) == 1, {"outputs": list(sample.outputs), "depth": depth},
    )
