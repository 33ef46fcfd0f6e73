"""lm-eval's task objects: its own by name, or the papers' five sets from files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TASKS = ("piqa", "arc_easy", "arc_challenge", "winogrande", "hellaswag")
"""The five sets of the papers, in the form of lm-eval's own tasks; `configs/NAME.yaml` reads NAME.jsonl."""

FIELDS = {
    "piqa": ("goal", "sol1", "sol2", "label"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "winogrande": ("context_options", "continuation", "gold"),
    "hellaswag": ("query", "choices", "gold"),
}


def load_tasks(names: Sequence[str], data: Path | None, fewshot: int | None, seed: int) -> dict[str, Any]:
    """Task objects by name.

    Args:
        names: of `TASKS`, or without `data` of any task of lm-eval.
        data: folder of NAME.jsonl files; None takes lm-eval's own tasks, whose data come from the hub.
        fewshot: solved examples in front of every question; None leaves it to the task.
        seed: of their choice.

    Raises:
        FileNotFoundError: a task has no file; ValueError: an unknown task, or a malformed line (its number is given).
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=data is None)
    if data is not None:
        specs: list[Any] = [_config(name, data) for name in names]
    else:
        known = set(manager.all_tasks)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown lm-eval task {unknown[0]!r}; `lm_eval ls tasks` lists them, and --data reads "
                             f"{', '.join(TASKS)} from files")
        specs = list(names)
    tasks: Mapping[str, Any] = manager.load(specs)["tasks"]
    for task in tasks.values():
        if fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=fewshot or 0)
        task.set_fewshot_seed(seed=seed)
    return dict(tasks)


def _config(name: str, data: Path) -> dict[str, Any]:
    """The configuration of one of `TASKS` with its file filled in."""
    import yaml

    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: files are read for {', '.join(TASKS)}")
    path = data.expanduser() / f"{name}.jsonl"
    if not path.is_file():
        held = sorted(file.stem for file in data.expanduser().glob("*.jsonl"))
        raise FileNotFoundError(f"{data}: has no {name}.jsonl, only {', '.join(held) or 'no .jsonl file at all'}")
    check_lines(path, FIELDS[name])
    config = yaml.safe_load((Path(__file__).parent / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    return config | {"dataset_kwargs": {"data_files": {"test": str(path.resolve())}}}


def check_lines(path: Path, fields: Sequence[str]) -> None:
    """Raise ValueError with its number at the first line that is no object with all the fields."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if missing := [field for field in fields if not isinstance(row, dict) or field not in row]:
            raise ValueError(f"{path}, line {number}: the field {missing[0]!r} is missing")
