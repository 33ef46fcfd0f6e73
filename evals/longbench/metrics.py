"""LongBench's metrics, equal to its published scorer on the same predictions."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.evals.longbench.tasks import FIRST_LINE, find_task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str] | None = None) -> float:
    """The best score of a prediction over the references, 0 to 1."""
    metric = METRICS[find_task(task).metric]
    if task in FIRST_LINE:
        prediction = first_line(prediction)
    return max((metric(prediction, answer, classes or ()) for answer in answers), default=0.0)


def first_line(text: str) -> str:
    """Up to the first line break that is not at the beginning."""
    return text.lstrip("\n").split("\n")[0]


def complete(task: str, prediction: str) -> bool:
    """Whether no further token can change the score."""
    if task in FIRST_LINE:
        return "\n" in prediction.lstrip("\n")
    if find_task(task).metric == "edit_similarity":
        return any(_is_code(line) for line in prediction.lstrip("\n").split("\n")[:-1])
    return False


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 over words, as of SQuAD: lower case, without punctuation and articles."""
    found, wanted = _words(prediction), _words(answer)
    same = sum((Counter(found) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L by the package `rouge`; 0 where it cannot be computed, as for empty texts."""
    check_extra("rouge", "LongBench's ROUGE-L")
    from rouge import Rouge

    try:
        scores: Any = Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return scores["rouge-l"]["f"]


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """One over the number of classes that are named, if the right one is among them."""
    named = [name for name in classes if name in prediction]
    # The published scorer removes from the list it walks through, so that the name behind a removed one
    # stays.
    i = 0
    while i < len(named):
        if named[i] in answer and named[i] != answer:
            named.remove(named[i])
        i += 1
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(answer)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """As `count`, for the number of a paragraph."""
    return count(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def edit_similarity(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line of code, in whole percents.

    This is `fuzz.ratio` of fuzzywuzzy on the standard library's matcher, which it uses unless
    python-Levenshtein, not among LongBench's requirements, is there.
    """
    line = next((line for line in prediction.lstrip("\n").split("\n") if _is_code(line)), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def _is_code(line: str) -> bool:
    return not any(mark in line for mark in ("`", "#", "//"))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "qa_f1": qa_f1, "rouge_l": rouge_l, "classification": classification, "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
}
