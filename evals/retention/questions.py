"""Questions on one compressed context, asked anew, in turn, or after other text."""

from collections.abc import Sequence
from typing import Any

from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.needle.samples import substring_score
from lowrank_kv_jax.evals.retention.contexts import Context, Needle

MODES = ("shared", "turns", "distance")
NEW_TOKENS = 24
"""Of an answer: a number of seven digits takes eight, and a sentence may stand around it."""


def questions_of(
    context: Context, length: int, index: int, modes: Sequence[str], after: Sequence[int] = (),
    between: Sequence[str] = (),
) -> list[Question]:
    """All that is asked of a context.

    * shared: each question of the compressed context, as if it were the first.
    * turns: one after the other; what was asked and the true answers stay in the cache. They are appended behind its
      context block by block, with a refresh behind each, as a conversation is.
    * distance: one question, other ones for other contexts, after text that has nothing to do with it.

    Args:
        length: the one that was asked for.
        index: of the context; it numbers the records.
        after, between: tokens of other text, and these texts.
    """
    needles, asked = context.needles, []
    for turn, needle in enumerate(needles, start=1):
        if "shared" in modes:
            asked.append(_question(f"shared, question {turn}", context, needle, length, index))
        if "turns" in modes:
            before = "".join(_said(earlier) for earlier in needles[: turn - 1])
            asked.append(_question(f"turns, turn {turn}", context, needle, length, index, before))
    if "distance" in modes:
        needle = needles[index % len(needles)]
        for tokens, text in zip(after, between, strict=True):
            before = f"{text}\n" if tokens else ""
            asked.append(_question(f"distance, after {tokens}", context, needle, length, index, before))
    return asked


def _said(needle: Needle) -> str:
    return f"{needle.question}{needle.prefix} {needle.value}.\n"


def _question(task: str, context: Context, needle: Needle, length: int, index: int, before: str = "") -> Question:
    def score(answer: str) -> float:
        return substring_score(answer, (needle.value,))

    return Question(
        task, length, index, context.text, before + needle.question, needle.prefix, NEW_TOKENS, score,
        lambda answer: score(answer) == 1, {"outputs": [needle.value], "needle_depth": needle.depth},
        reference=f" {needle.value}",
    )


def cut_text(tokenizer: Any, ids: Sequence[int], tokens: int, place: int) -> str:
    """So many tokens of a text as a text, the `place`-th of such pieces, from the beginning again where the text ends.

    Args:
        ids: of the whole text.
    """
    begin = place * tokens % max(len(ids) - tokens, 1)
    return tokenizer.decode([ids[(begin + i) % len(ids)] for i in range(tokens)])
