"""What every retrieval task is made of: a context, a question about it, and the answers that count."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question, split where a query-agnostic cache is compressed.

    Attributes:
        task: name of the task.
        context: everything before the last question line, its line break included.
        question: the question line, followed directly by the answer prefix.
        outputs: the references.
        length: tokens of context, question and reserved answer together.
        depth: where in the haystack the needle lies, 0 first and 1 last; None where there is no single one.
    """

    task: str
    context: str
    question: str
    outputs: tuple[str, ...]
    length: int
    depth: float | None = None

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.context + self.question

    def tokens(self, tokenizer: Any) -> tuple[list[int], list[int]]:
        """Ids of the context, special tokens in front as the tokenizer puts them, and of the question."""
        question = tokenizer.encode(self.question, add_special_tokens=False)
        return list(tokenizer.encode(self.context)), list(question)


def substring_score(answer: str, outputs: tuple[str, ...]) -> float:
    """Share of the references that the answer contains, case-insensitively (RULER's `string_match_all`)."""
    return sum(reference.lower() in answer.lower() for reference in outputs) / len(outputs)
