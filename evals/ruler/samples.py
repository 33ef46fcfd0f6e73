"""A sample of RULER: generated, or read from a file in the official format."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from lowrank_kv_jax.evals.ruler.tasks import find_task


@dataclasses.dataclass(frozen=True)
class RulerSample:
    """One prompt and its references.

    Attributes:
        task: name of the task.
        index: its place among the samples of the task, from 0.
        input: the prompt without the answer prefix.
        answer_prefix: follows the input directly.
        outputs: the references.
        length: tokens of input, prefix and reserved answer, where known.
    """

    task: str
    index: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int | None = None

    @property
    def context(self) -> str:
        """What a query-agnostic cache is compressed from."""
        return split_context(self.task, self.input)[0]

    @property
    def question(self) -> str:
        """What is asked of the cache: the question line, followed by the answer prefix."""
        return split_context(self.task, self.input)[1] + self.answer_prefix


def split_context(task: str, text: str) -> tuple[str, str]:
    """Cut a prompt in front of its last question, by the template of the task; the line breaks stay with the
    context.

    Raises:
        ValueError: an unknown task, or a prompt that asks nothing in the words of its template.
    """
    marker = find_task(task).family.question
    at = text.rfind(marker)
    if at < 0:
        raise ValueError(f"task {task!r}: the input has no question that starts with {marker.strip()!r} on "
                         f"its own line")
    at += len(marker) - len(marker.lstrip("\n"))
    return text[:at], text[at:]


def cut_prefix(task: str, prompt: str) -> tuple[str, str]:
    """Input and answer prefix of a whole prompt."""
    at = prompt.rfind(find_task(task).family.answer_prefix[:10])
    return prompt[:at], prompt[at:]


def load_task(path: str | os.PathLike, task: str | None = None) -> list[RulerSample]:
    """Read a TASK.jsonl file in the official format: input, answer_prefix (or none), outputs, one object a
    line.

    Samples are numbered by their lines, since `index` is no number of the sample in the official needle
    tasks.

    Args:
        task: the name of the task; by default the stem of the file.

    Raises:
        ValueError: an unknown task, no sample, or a malformed line; its number is given.
        FileNotFoundError: no such file.
    """
    path = Path(path).expanduser()
    task = find_task(path.stem if task is None else task).name
    samples = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            samples.append(_sample(task, len(samples), json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not samples:
        raise ValueError(f"{path}: holds no sample")
    return samples


def save_task(path: str | os.PathLike, samples: list[RulerSample]) -> None:
    """Write samples in the official format."""
    lines = [json.dumps({
        "index": s.index, "input": s.input, "outputs": list(s.outputs), "length": s.length,
        "answer_prefix": s.answer_prefix,
    }) + "\n" for s in samples]
    Path(path).expanduser().write_text("".join(lines), encoding="utf-8")


def _sample(task: str, index: int, row: Any) -> RulerSample:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the fields input, answer_prefix and outputs, got "
                         f"{type(row).__name__}")
    for field in ("input", "outputs"):
        if field not in row:
            raise ValueError(f"the field {field!r} is missing")
    outputs = row["outputs"]
    outputs = [outputs] if isinstance(outputs, str) else outputs
    if not isinstance(outputs, list) or not outputs or not all(isinstance(o, str) for o in outputs):
        raise ValueError("outputs: expected a list of at least one string")
    text, prefix, length = row["input"], row.get("answer_prefix", ""), row.get("length")
    if not isinstance(text, str) or not isinstance(prefix, str):
        raise ValueError("input and answer_prefix: expected strings")
    if length is not None and not isinstance(length, int):
        raise ValueError(f"length={length!r}: expected a number of tokens")
    split_context(task, text)
    return RulerSample(task, index, text, prefix, tuple(outputs), length)
