"""Samples of LongBench: from a folder of JSONL files or from the hub."""

import dataclasses
import os
import re
import zipfile
from collections.abc import Iterable
from typing import Any

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.checks.hub import quiet_hub
from lowrank_kv_jax.checks.json_objects import parse_json
from lowrank_kv_jax.evals.asking.task_files import task_file
from lowrank_kv_jax.evals.longbench.tasks import find_task
from lowrank_kv_jax.evals.results.fields import check_texts, wrong
from lowrank_kv_jax.files import expanded

HUB = "THUDM/LongBench"
HUB_FILE = "data.zip"
ANSWERS = {"retrieval": (r"Paragraph \d+", "Paragraph N, its number,"), "count": (r"\d+", "a number")}
"""What the references of a metric must hold, without which it cannot score."""


@dataclasses.dataclass(frozen=True)
class LongBenchSample:
    """One sample.

    Attributes:
        task: name of the task.
        index: its place among the samples of the task, from 0.
        context, question: the fields that the prompt is made of (`input` is the question).
        answers: the references.
        classes: what can be answered, for classification.
        id: as published.
    """

    task: str
    index: int
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    id: str | None = None


def load_samples(task: str, data: str | os.PathLike | None = None,
                 samples: int | None = None) -> list[LongBenchSample]:
    """The first samples of a task.

    Args:
        data: a folder of TASK.jsonl files in LongBench's fields; a dataset of the hub that has a
            configuration for each task, as "organisation/name"; or None for the archive of LongBench on the
            hub.
        samples: how many; by default all.

    Raises:
        ValueError: an unknown task, no sample, or a malformed line, whose number is given.
        FileNotFoundError: no such file, or the hub cannot be reached.
    """
    find_task(task)
    if samples is not None and samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    if data is None:
        return read_lines(task, _hub_lines(task), f"{HUB}, {task}", samples)
    folder = expanded(data)
    if folder.is_dir():
        path = task_file(folder, task)
        with open(path, "rb") as file:  # decoded line by line, so that bytes which are no UTF-8 are found there
            return read_lines(task, file, str(path), samples)
    if folder.exists():
        raise ValueError(f"{data}: is a file; must be a folder of TASK.jsonl files")
    name = os.fspath(data)
    if name.count("/") != 1 or name[0] in "./~":
        raise FileNotFoundError(f"{name}: no such folder")
    rows = _dataset_rows(name, task)
    return [_placed(task, i, row, f"{name}, {task}, row {i}")
            for i, row in zip(range(samples or len(rows)), rows, strict=False)]


def read_lines(task: str, lines: Iterable[str | bytes], source: str,
               samples: int | None = None) -> list[LongBenchSample]:
    """Samples of JSONL lines.

    Raises:
        ValueError: a malformed line, whose number is given, or no sample at all.
    """
    read: list[LongBenchSample] = []
    for number, line in enumerate(lines, start=1):
        if samples is not None and len(read) == samples:
            break
        if line.strip():
            place = f"{source}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            read.append(_placed(task, len(read), row, place))
    if not read:
        raise ValueError(f"{source}: holds no sample")
    return read


def _placed(task: str, index: int, row: Any, place: str) -> LongBenchSample:
    try:
        return _sample(task, index, row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _sample(task: str, index: int, row: Any) -> LongBenchSample:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the fields of LongBench, got {type(row).__name__}")
    missing = [field for field in ("context", "input", "answers") if field not in row]
    if missing:
        raise ValueError(f"the field {missing[0]!r} is missing")
    for field in ("context", "input"):
        if not isinstance(row[field], str):
            raise wrong(field, row[field], "a string")
    metric = find_task(task).metric
    answers, classes = _answers(row["answers"], metric), _classes(row.get("all_classes"), metric)
    return LongBenchSample(task, index, row["context"], row["input"], answers, classes, row.get("_id"))


def _answers(answers: Any, metric: str) -> tuple[str, ...]:
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise wrong("answers", answers, "a list of at least one string")
    pattern, allowed = ANSWERS.get(metric, ("", ""))
    if not all(re.search(pattern, answer) for answer in answers):
        raise wrong("answers", answers, f"{allowed} in each")
    return tuple(answers)


def _classes(classes: Any, metric: str) -> tuple[str, ...]:
    """Only classification needs them; elsewhere they are null or empty."""
    if metric != "classification" and classes in (None, []):
        return ()
    return check_texts("all_classes", classes)


def _hub_lines(task: str) -> Iterable[bytes]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with quiet_hub():
            archive = huggingface_hub.hf_hub_download(HUB, HUB_FILE, repo_type="dataset")
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"{HUB} is not in the cache and the hub cannot be reached: give a folder of "
                                f"TASK.jsonl "
                                "files") from error
    with zipfile.ZipFile(archive) as opened, opened.open(f"data/{task}.jsonl") as file:
        return file.read().split(b"\n")


def _dataset_rows(name: str, task: str) -> Any:
    check_extra("datasets", f"{name}, a dataset of the hub")
    import datasets  # slow to import, and only needed here

    try:
        with quiet_hub():
            return datasets.load_dataset(name, task, split="test")
    except (OSError, ValueError, RuntimeError) as error:
        raise FileNotFoundError(f"{name}: no such folder here, and as a dataset it cannot be loaded: "
                                f"{error}") from error
