"""LongBench through compressed caches."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate_calibrated
from lowrank_kv_jax.evals.longbench.metrics import complete, score
from lowrank_kv_jax.evals.longbench.samples import LongBenchSample, load_samples
from lowrank_kv_jax.evals.longbench.tasks import BASE_PROMPT, NONEMPTY, all_tasks, find_task
from lowrank_kv_jax.method import Part

COMMAND = "eval longbench"
RESERVED = 640
"""Of the model's context, for the longest answer (512 tokens) and a chat template."""


def evaluate_longbench(
    model: Any, methods: Mapping[str, Part], tasks: Sequence[str] | None = None,
    samples: int | None = None,
    protocol: str = "query-agnostic", *, data: str | os.PathLike | None = None, max_length: int | None = None,
    json: str | os.PathLike | None = None, style: str = "base", rows: int = 2, dtype: str | None = None,
    calibrate: Corpus | None = None, progress: bool = False, seed: int = 0, mesh: Any = None,
    prefill_chunk: int | None = None,
) -> list[dict[str, Any]]:
    """Score methods on LongBench.

    Args:
        model: a `LoadedModel` with a tokenizer.
        methods: by spec.
        tasks: names; by default all 16.
        samples: of each task, its first ones; by default all.
        data: see `load_samples`.
        max_length: tokens that longer prompts are cut down to, out of the middle; by default what the model's
            context leaves after `RESERVED`.
        protocol, style, rows, dtype, prefill_chunk: see `Suite`. With the style "chat" few-shot and code tasks keep
            the base prompt.
        json, progress, mesh: see `evaluate`.
        calibrate: what bases are fitted to, by default the first half of Python's language reference.
        seed: kept in the records; nothing here is random.

    Returns:
        One record for each sample and method; their `length` is `max_length`.

    Raises:
        ValueError, OSError: as `load_samples` and `evaluate`; a `max_length` beyond the model's context.
    """
    limit = model.config.context - RESERVED if max_length is None else max_length
    if not 2 <= limit <= model.config.context:
        raise ValueError(f"max_length={limit}: must lie in 2..{model.config.context}, the model's context")
    names = list(dict.fromkeys(find_task(name).name for name in tasks)) if tasks else list(all_tasks())
    loaded = [sample for name in names for sample in load_samples(name, data, samples)]
    questions = tuple(make_question(model.tokenizer, sample, limit) for sample in loaded)
    suite = Suite(COMMAND, questions, protocol, style, seed, rows, dtype, prefill_chunk=prefill_chunk)
    return evaluate_calibrated(model, methods, suite, calibrate, json=json, progress=progress, mesh=mesh)


def make_question(tokenizer: Any, sample: LongBenchSample, max_length: int) -> Question:
    """The prompt of a sample, cut to `max_length` tokens, with its metric."""
    task = find_task(sample.task)
    context, question = task.split_prompt(sample.context, sample.question)
    context, question, cut = truncate(tokenizer, context, question, max_length)
    return Question(
        sample.task, max_length, sample.index, context, question, "", task.new_tokens,
        lambda answer: score(sample.task, answer, sample.answers, sample.classes),
        lambda answer: complete(sample.task, answer),
        {"outputs": list(sample.answers), "sample_id": sample.id, "truncated": cut},
        "base" if sample.task in BASE_PROMPT else None,
        sample.task in NONEMPTY,
    )


def truncate(tokenizer: Any, context: str, question: str, max_length: int) -> tuple[str, str, bool]:
    """Cut the middle out of a prompt of more than `max_length` tokens, as LongBench does.

    Returns:
        Context and question, put together the prompt that is left, and whether it was cut. Where the question
        itself is longer than half of what is left, the second half stands for it.
    """
    ids = tokenizer(context + question, verbose=False).input_ids
    if len(ids) <= max_length:
        return context, question, False
    half = max_length // 2
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    if len(last) > len(question) and last.endswith(question):
        return first + last.removesuffix(question), question, True
    return first, last, True
