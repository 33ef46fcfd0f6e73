"""Files of tasks, TASK.jsonl each, in a folder of the user's."""

import os
from pathlib import Path

from lowrank_kv_jax.files import expanded


def task_file(folder: str | os.PathLike, task: str) -> Path:
    """The file of a task.

    Raises:
        FileNotFoundError: there is none, or no such folder; what the folder has instead is named.
    """
    place = expanded(folder)
    path = place / f"{task}.jsonl"
    if not place.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not path.is_file():
        held = ", ".join(sorted(file.stem for file in place.glob("*.jsonl")))
        instead = f"but {held}" if held else "nor any other .jsonl file"
        raise FileNotFoundError(f"{folder}: has no {path.name}, {instead}")
    return path
