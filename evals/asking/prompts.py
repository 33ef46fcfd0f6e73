"""Questions about contexts, and how they become tokens for each protocol and prompt style."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

PROTOCOLS = ("query-agnostic", "query-aware")
"""Whether the context is compressed before the question is seen, or together with it."""

STYLES = ("base", "chat")
"""Whether a prompt is given to the model as it is, or as a user's turn in its chat template."""


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context, and how its answers are scored.

    Attributes:
        task, length, index: together they name it within a run; length is the one that was asked for.
        context: what a query-agnostic cache is compressed from.
        question: follows the context directly.
        answer_prefix: follows the question, or the chat template's opening of the answer.
        new_tokens: of the answer, at most.
        score: of an answer, 0 to 1.
        complete: whether no further token can change the score of an answer.
        details: what its records keep beside that.
        style: the prompt style, where the task decides it and not the run.
        nonempty: whether the first token of an answer can neither end it nor be a line break.
        special: whether `complete` sees special tokens, which are no part of an answer, as text.
        reference: an answer whose likelihood is told, too; of at most `new_tokens` tokens.
    """

    task: str
    length: int
    index: int
    context: str
    question: str
    answer_prefix: str
    new_tokens: int
    score: Callable[[str], float]
    complete: Callable[[str], bool] = lambda answer: False
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    style: str | None = None
    nonempty: bool = False
    special: bool = False
    reference: str | None = None

    @property
    def sha256(self) -> str:
        """Of the whole prompt and the references."""
        parts = (self.context, self.question, self.answer_prefix, repr(self.details.get("outputs")))
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def encode(tokenizer: Any, question: Question, protocol: str, style: str) -> tuple[list[int], list[int]]:
    """Ids that are compressed, and ids that are asked of the compressed cache.

    Context and question are tokenised on their own in both protocols, so that the full cache answers alike. A
    query-aware cache is compressed from all of the prompt but its last token.

    Raises:
        ValueError: as `chat_parts`.
    """
    style = question.style or style
    context, asked = question.context, question.question + question.answer_prefix
    if style == "chat":
        context, asked = chat_parts(tokenizer, question)
    head = _ids(tokenizer, context, special=style == "base")
    tail = _ids(tokenizer, asked, special=False)
    if protocol == "query-agnostic":
        return head, tail
    return head + tail[:-1], tail[-1:]


def chat_parts(tokenizer: Any, question: Question) -> tuple[str, str]:
    """The prompt in the model's chat template, cut behind the context; the answer prefix opens the model's
    turn.

    Raises:
        ValueError: the tokenizer has no chat template, or one that changes the text.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model's tokenizer has no chat template: ask for the base prompt")
    text = user_turn(tokenizer, question.context + question.question)
    context = question.context.strip()  # templates strip what they are given
    at = text.find(context)
    if at < 0:
        raise ValueError("this model's chat template does not keep the context as it is: ask for the base "
                         "prompt")
    trailing = len(question.context.rstrip()) - len(question.context)
    end = at + len(context) - trailing
    return text[:end], text[end:] + question.answer_prefix


def user_turn(tokenizer: Any, text: str) -> str:
    """A text as a user says it in the model's chat template, up to where the model answers.

    Raises:
        ValueError: the template fails: it is a program of the model's, with errors of Jinja's or its own.
    """
    turn = [{"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise ValueError(f"the model's chat template fails ({type(error).__name__}: {error})") from error


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
