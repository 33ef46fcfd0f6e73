"""The 16 English tasks of LongBench: prompts, metrics, and how much of a prediction counts."""

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

METRICS = {
    "narrativeqa": "qa_f1", "qasper": "qa_f1", "multifieldqa_en": "qa_f1", "hotpotqa": "qa_f1",
    "2wikimqa": "qa_f1",
    "musique": "qa_f1", "gov_report": "rouge_l", "qmsum": "rouge_l", "multi_news": "rouge_l",
    "trec": "classification",
    "triviaqa": "qa_f1", "samsum": "rouge_l", "passage_count": "count", "passage_retrieval_en": "retrieval",
    "lcc": "edit_similarity", "repobench-p": "edit_similarity",
}

BASE_PROMPT = frozenset({"trec", "triviaqa", "samsum", "lcc", "repobench-p"})
"""Tasks whose prompt is never put into a chat template: examples or code to be continued."""

FIRST_LINE = frozenset({"trec", "triviaqa", "samsum"})
"""Tasks whose predictions count up to their first line break."""

NONEMPTY = frozenset({"samsum"})
"""Tasks whose first token can neither end the prediction nor be a line break (`min_length` of the published script)."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        prompt: the official template, with the fields `{context}` and mostly `{input}`.
        metric: a name of `metrics.METRICS`.
        new_tokens: of a prediction, at most.
    """

    name: str
    prompt: str
    metric: str
    new_tokens: int

    def split_prompt(self, context: str, question: str) -> tuple[str, str]:
        """The prompt of a sample, cut behind its context."""
        head, _, tail = self.prompt.partition("{context}")
        return head + context, tail.replace("{input}", question)


@functools.cache
def all_tasks() -> Mapping[str, Task]:
    """By name, in the order of the paper; prompts are those published with the data."""
    table = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    return MappingProxyType({
        name: Task(name, entry["prompt"], METRICS[name], entry["new_tokens"]) for name, entry in table.items()
    })


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: there is none; the nearest name is given.
    """
    tasks = all_tasks()
    if name in tasks:
        return tasks[name]
    close = difflib.get_close_matches(name, list(tasks), n=1, cutoff=0.4)
    hint = f", did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown LongBench task {name!r}{hint}; tasks: {', '.join(tasks)}")
