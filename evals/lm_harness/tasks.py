"""lm-eval's task objects: its own by name, or the papers' five sets from files."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowrank_kv_jax.checks.json_objects import parse_json
from lowrank_kv_jax.evals.asking.task_files import task_file
from lowrank_kv_jax.evals.results.fields import check_choice, check_text, check_texts, wrong

TASKS = ("piqa", "arc_easy", "arc_challenge", "winogrande", "hellaswag")
"""The five sets of the papers, in the form of lm-eval's own tasks; `configs/NAME.yaml` reads NAME.jsonl."""

FIELDS = {
    "piqa": ("goal", "sol1", "sol2", "label"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "winogrande": ("context_options", "continuation", "gold"),
    "hellaswag": ("query", "choices", "gold"),
}


def load_tasks(
    names: Sequence[str], data: str | os.PathLike | None, fewshot: int | None, seed: int
) -> dict[str, Any]:
    """Task objects by name.

    Args:
        names: of `TASKS`, or without `data` of any task of lm-eval.
        data: folder of NAME.jsonl files; None takes lm-eval's own tasks, whose data come from the hub.
        fewshot: solved examples in front of every question; None leaves it to the task.
        seed: of their choice.

    Raises:
        FileNotFoundError: a task has no file; ValueError: an unknown task, an empty file, or a malformed line (its
            number is given).
    """
    from lm_eval.tasks import TaskManager

    names = list(dict.fromkeys(names))
    manager = TaskManager(include_defaults=data is None)
    if data is not None:
        specs: list[Any] = [_config(name, data) for name in names]
    else:
        known = set(manager.all_tasks)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown lm-eval task {unknown[0]!r}; `lm_eval ls tasks` lists them, and --data reads "
                             f"{', '.join(TASKS)} from files")
        specs = names
    tasks: Mapping[str, Any] = manager.load(specs)["tasks"]
    for name, task in tasks.items():
        if task.OUTPUT_TYPE != "multiple_choice":
            raise ValueError(f"lm-eval task {name!r} is of type {task.OUTPUT_TYPE}: must be multiple_choice here; "
                             "`lm_eval --model lowrank-kv` runs all")
        if fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=fewshot or 0)
        task.set_fewshot_seed(seed=seed)
    return dict(tasks)


def _config(name: str, data: str | os.PathLike) -> dict[str, Any]:
    """The configuration of one of `TASKS` with its file filled in."""
    import yaml

    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: files are read for {', '.join(TASKS)}")
    path = task_file(data, name)
    check_lines(path, name)
    config = yaml.safe_load((Path(__file__).parent / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    return config | {"dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}


def check_lines(path: Path, name: str) -> None:
    """Raise ValueError unless every line of a file is a document of the task `name`, and there is one."""
    found = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        found += 1
        try:
            _check_document(name, parse_json(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path}: holds no document")


def _check_document(name: str, row: Any) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the fields {', '.join(FIELDS[name])}, got {type(row).__name__}")
    if missing := [field for field in FIELDS[name] if field not in row]:
        raise ValueError(f"the field {missing[0]!r} is missing")
    _CHECKS[name](row)


def _check_piqa(row: Mapping[str, Any]) -> None:
    for field in ("goal", "sol1", "sol2"):
        check_text(field, row[field])
    check_choice("label", row["label"], 2)


def _check_arc(row: Mapping[str, Any]) -> None:
    check_text("question", row["question"])
    choices = row["choices"]
    if not isinstance(choices, dict):
        raise wrong("choices", choices, "an object with the lists text and label")
    texts, labels = (check_texts(f"choices.{field}", choices.get(field)) for field in ("text", "label"))
    if len(texts) != len(labels):
        raise wrong("choices.label", list(labels), f"one for each of the {len(texts)} texts")
    if row["answerKey"] not in labels:
        raise wrong("answerKey", row["answerKey"], f"one of {', '.join(labels)}")


def _check_winogrande(row: Mapping[str, Any]) -> None:
    check_text("continuation", row["continuation"])
    check_choice("gold", row["gold"], len(check_texts("context_options", row["context_options"])))


def _check_hellaswag(row: Mapping[str, Any]) -> None:
    check_text("query", row["query"])
    check_choice("gold", row["gold"], len(check_texts("choices", row["choices"])))


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "piqa": _check_piqa, "arc_easy": _check_arc, "arc_challenge": _check_arc, "winogrande": _check_winogrande,
    "hellaswag": _check_hellaswag,
}
