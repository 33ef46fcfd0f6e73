"""RULER through compressed caches."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking.batches import check_lengths
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate_calibrated
from lowrank_kv_jax.evals.asking.task_files import task_file
from lowrank_kv_jax.evals.ruler.generate import SEED, generate
from lowrank_kv_jax.evals.ruler.haystack import load_haystack
from lowrank_kv_jax.evals.ruler.qa import QuestionSet, load_questions
from lowrank_kv_jax.evals.ruler.samples import RulerSample, load_task
from lowrank_kv_jax.evals.ruler.scoring import score
from lowrank_kv_jax.evals.ruler.tasks import QA, expand_tasks, find_task
from lowrank_kv_jax.files import expanded
from lowrank_kv_jax.method import Part

COMMAND = "eval ruler"


def evaluate_ruler(
    model: Any, methods: Mapping[str, Part], tasks: Sequence[str], lengths: Sequence[int] | None = None,
    samples: int | None = None, protocol: str = "query-agnostic", seed: int = SEED, *,
    data: str | os.PathLike | None = None,
    haystack: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    questions: Mapping[str, str | os.PathLike] | None = None, json: str | os.PathLike | None = None,
    style: str = "base", rows: int = 5, dtype: str | None = None, calibrate: Corpus | None = None,
    progress: bool = False, mesh: Any = None, prefill_chunk: int | None = None, draft: bool = False,
    shapes: str = "few", block: int | None = None,
) -> list[dict[str, Any]]:
    """Score methods on RULER.

    Args:
        model: a `LoadedModel` with a tokenizer.
        methods: by spec.
        tasks: names of tasks and of groups of them.
        lengths: in tokens, the answer included; by default 1024, or whatever `data` holds.
        samples: of each task and length; by default 10, or all that `data` holds.
        protocol, style, rows, dtype, prefill_chunk, shapes, block: see `Suite`.
        seed: of the samples.
        data: a folder of TASK.jsonl or LENGTH/TASK.jsonl in the official format, instead of generating.
        haystack: of the essay tasks, see `load_haystack`.
        questions: files of the qa tasks by data set, see `load_questions`; by default from the hub.
        json: records are appended to it; those that it holds are not computed again.
        calibrate: what bases are fitted to, by default the first half of Python's language reference.
        progress: show progress bars.
        mesh: see `evaluate`.
        draft: see `Suite`.

    Returns:
        One record for each sample and method.

    Raises:
        ValueError, OSError: as `expand_tasks`, `check_lengths`, `generate`, `read_samples`, `evaluate`.
    """
    suite = make_suite(model, tasks, lengths, samples, protocol, seed, data=data, haystack=haystack,
                       questions=questions, style=style, rows=rows, dtype=dtype, draft=draft, shapes=shapes)
    suite = dataclasses.replace(suite, prefill_chunk=prefill_chunk, block=block)
    return evaluate_calibrated(model, methods, suite, calibrate, json=json, progress=progress, mesh=mesh)


def make_suite(
    model: Any, tasks: Sequence[str], lengths: Sequence[int] | None = None, samples: int | None = None,
    protocol: str = "query-agnostic", seed: int = SEED, *, data: str | os.PathLike | None = None,
    haystack: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    questions: Mapping[str, str | os.PathLike] | None = None, style: str = "base", rows: int = 5,
    dtype: str | None = None, draft: bool = False, shapes: str = "few",
) -> Suite:
    """What is asked; the arguments are those of `evaluate_ruler`."""
    names = expand_tasks(tuple(tasks))
    lengths = tuple(dict.fromkeys(lengths)) if lengths else None
    if data is not None:
        drawn = read_samples(data, names, lengths, samples)
        source: dict[str, Any] = {"source": "data"}
    else:
        check_lengths(lengths or (1024,), model.config.context)
        drawn, source = draw_samples(model.tokenizer, names, lengths or (1024,), samples, seed, haystack,
                                     questions)
    asked = tuple(question_of(sample, length) for length, sample in drawn)
    source |= {"draft": True} if draft else {}
    return Suite(COMMAND, asked, protocol, style, seed, rows, dtype, source, draft=draft, shapes=shapes)


def draw_samples(
    tokenizer: Any, tasks: Sequence[str], lengths: Sequence[int], samples: int | None, seed: int,
    haystack: Any = None,
    questions: Mapping[str, str | os.PathLike] | None = None,
) -> tuple[list[tuple[int, RulerSample]], dict[str, Any]]:
    """Generated samples with their lengths, and what records keep of where they come from."""
    essays = [name for name in tasks if find_task(name).parameters.get("haystack") == "essay"]
    text = load_haystack(haystack) if essays else ""
    sets: dict[str, QuestionSet] = {}
    for name in tasks:
        if find_task(name).family is QA:
            dataset = find_task(name).parameters["dataset"]
            sets[name] = load_questions(dataset, (questions or {}).get(dataset))
    drawn = [
        (length, sample) for length in lengths for name in tasks
        for sample in generate(name, tokenizer, length, 10 if samples is None else samples, seed,
                               haystack=text,
                               questions=sets.get(name))
    ]
    return drawn, {"source": "generated", "haystack": _name(haystack, text) if essays else None}


def read_samples(
    data: str | os.PathLike, tasks: Sequence[str], lengths: Sequence[int] | None, samples: int | None
) -> list[tuple[int, RulerSample]]:
    """Samples of the files in a folder, with their lengths.

    Without `lengths`, those of the folder's numbered subfolders are read, or the files of the folder itself,
    whose length is that of their longest sample.

    Raises:
        FileNotFoundError: a task has no file; ValueError: as `load_task`, several lengths and no subfolders, or
            a length that is not that of a folder's own files.
    """
    folder = expanded(data)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    numbered = sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())
    folders: list[tuple[int | None, Path]]
    if numbered:
        missing = sorted(set(lengths or ()) - set(numbered))
        if missing:
            raise FileNotFoundError(f"{folder}: has no samples of length {missing[0]}, only of "
                                    f"{', '.join(map(str, numbered))}")
        folders = [(length, folder / str(length)) for length in lengths or numbered]
    elif lengths and len(lengths) > 1:
        raise ValueError(f"{folder}: has no subfolder for each of the lengths {', '.join(map(str, lengths))}")
    else:
        folders = [(lengths[0] if lengths else None, folder)]
    drawn = []
    for length, place in folders:
        for name in tasks:
            found = load_task(task_file(place, name), length=None if numbered else length)
            label = length if length is not None else max(sample.length or 0 for sample in found)
            drawn += [(label, sample) for sample in found[:samples]]
    return drawn


def question_of(sample: RulerSample, length: int, new_tokens: int | None = None) -> Question:
    """What is asked of a cache.

    Args:
        length: the one that was asked for.
        new_tokens: of the answer, at most those that the task allows, which are the default.
    """
    task = find_task(sample.task)
    new_tokens = task.new_tokens if new_tokens is None else min(new_tokens, task.new_tokens)

    def right(answer: str) -> float:
        return score(sample.task, answer, sample.outputs)

    prefix = sample.answer_prefix
    asked = sample.question.removesuffix(prefix) if prefix else sample.question
    return Question(
        sample.task, length, sample.index, sample.context, asked, prefix, new_tokens, right,
        lambda answer: right(answer) == 1,
        {"outputs": list(sample.outputs), "sample_length": sample.length, "new_tokens": new_tokens},
    )


def _name(haystack: Any, text: str) -> dict[str, str]:
    parts = [haystack] if haystack is None or isinstance(haystack, str | os.PathLike) else list(haystack)
    names = ["pydoc" if part is None else os.path.basename(os.fspath(part)) for part in parts]
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return {"name": "+".join(names), "sha256": digest[:16]}
