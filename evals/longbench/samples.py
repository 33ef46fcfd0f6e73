"""Samples of LongBench: from a folder of JSONL files or from the hub."""

import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowrank_kv_jax.evals.longbench.tasks import find_task

HUB = "THUDM/LongBench"
HUB_FILE = "data.zip"


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
    folder = Path(data).expanduser()
    if folder.is_dir():
        path = folder / f"{task}.jsonl"
        if not path.is_file():
            held = sorted(path.stem for path in folder.glob("*.jsonl"))
            raise FileNotFoundError(f"{folder}: has no {task}.jsonl, only "
                                    f"{', '.join(held) or 'no .jsonl file at all'}")
        with open(path, encoding="utf-8") as file:
            return read_lines(task, file, str(path), samples)
    name = os.fspath(data)
    if name.count("/") != 1 or name[0] in "./~":
        raise FileNotFoundError(f"{name}: no such folder")
    rows = _dataset_rows(name, task)
    return [_sample(task, i, row) for i, row in zip(range(samples or len(rows)), rows, strict=False)]


def read_lines(task: str, lines: Iterable[str], source: str,
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
            try:
                read.append(_sample(task, len(read), json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}") from error
    if not read:
        raise ValueError(f"{source}: holds no sample")
    return read


def _sample(task: str, index: int, row: Any) -> LongBenchSample:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the fields of LongBench, got {type(row).__name__}")
    missing = [field for field in ("context", "input", "answers") if field not in row]
    if missing:
        raise ValueError(f"the field {missing[0]!r} is missing")
    answers, classes = row["answers"], row.get("all_classes") or []
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError("answers: expected a list of at least one string")
    if not isinstance(row["context"], str) or not isinstance(row["input"], str):
        raise ValueError("context and input: expected strings")
    return LongBenchSample(
        task, index, row["context"], row["input"], tuple(answers), tuple(classes), row.get("_id")
    )


def _hub_lines(task: str) -> Iterable[str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        archive = huggingface_hub.hf_hub_download(HUB, HUB_FILE, repo_type="dataset")
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"{HUB} is not in the cache and the hub cannot be reached: give a folder of "
                                f"TASK.jsonl "
                                "files") from error
    with zipfile.ZipFile(archive) as opened, opened.open(f"data/{task}.jsonl") as file:
        return io.TextIOWrapper(file, encoding="utf-8").read().split("\n")


def _dataset_rows(name: str, task: str) -> Any:
    import datasets  # slow to import, and only needed here

    try:
        return datasets.load_dataset(name, task, split="test")
    except (OSError, ValueError, RuntimeError) as error:
        raise FileNotFoundError(f"{name}: no such folder here, and as a dataset it cannot be loaded: "
                                f"{error}") from error
