"""A sample of RULER: generated, or read from a file in the official format."""

import dataclasses
import json
import os
from typing import Any

from lowrank_kv_jax.checks.json_objects import parse_json
from lowrank_kv_jax.evals.results.fields import check_texts, wrong
from lowrank_kv_jax.evals.ruler.tasks import find_task
from lowrank_kv_jax.files import expanded, read_text, write_text


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


def load_task(path: str | os.PathLike, task: str | None = None, length: int | None = None) -> list[RulerSample]:
    """Read a TASK.jsonl file in the official format: input, answer_prefix (or none), outputs, one object a
    line.

    Samples are numbered by their lines, since `index` is no number of the sample in the official needle
    tasks.

    Args:
        task: the name of the task; by default the stem of the file.
        length: the one that the samples were made for, where it is to be checked: none may be longer, and the
            longest takes at least half of it.

    Raises:
        ValueError: an unknown task, no sample, a malformed line or one of another length; its number is given.
        FileNotFoundError: no such file.
    """
    path = expanded(path)
    task = find_task(path.stem if task is None else task).name
    samples, numbers = [], []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            samples.append(_sample(task, len(samples), parse_json(line), length))
            numbers.append(number)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not samples:
        raise ValueError(f"{path}: holds no sample")
    longest = max(samples, key=lambda sample: sample.length or 0)
    if length is not None and longest.length is not None and 2 * longest.length < length:
        raise ValueError(f"{path}, line {numbers[longest.index]}: the longest sample has length={longest.length}, "
                         f"not half of the {length} tokens asked for")
    return samples


def save_task(path: str | os.PathLike, samples: list[RulerSample]) -> None:
    """Write samples in the official format."""
    lines = [json.dumps({
        "index": s.index, "input": s.input, "outputs": list(s.outputs), "length": s.length,
        "answer_prefix": s.answer_prefix,
    }) + "\n" for s in samples]
    write_text(path, "".join(lines))


def _sample(task: str, index: int, row: Any, most: int | None) -> RulerSample:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the fields input, answer_prefix and outputs, got "
                         f"{type(row).__name__}")
    for field in ("input", "outputs"):
        if field not in row:
            raise ValueError(f"the field {field!r} is missing")
    outputs = row["outputs"]
    outputs = check_texts("outputs", [outputs] if isinstance(outputs, str) else outputs)
    text, prefix, length = row["input"], row.get("answer_prefix", ""), row.get("length")
    for field, value in (("input", text), ("answer_prefix", prefix)):
        if not isinstance(value, str):
            raise wrong(field, value, "a string")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise wrong("length", length, "a number of tokens")
    if length is not None and most is not None and length > most:
        raise wrong("length", length, f"at most the {most} tokens asked for")
    split_context(task, text)
    return RulerSample(task, index, text, prefix, outputs, length)
