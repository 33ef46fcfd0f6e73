"""Question answering: the documents that answer a question among others that do not."""

import dataclasses
import functools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.checks.hub import quiet_hub
from lowrank_kv_jax.checks.json_objects import parse_json
from lowrank_kv_jax.evals.results.fields import check_text, check_texts
from lowrank_kv_jax.evals.ruler.sizing import count_tokens, draw, largest
from lowrank_kv_jax.evals.ruler.tasks import Task
from lowrank_kv_jax.files import read_text

STEP = 10
HUB = {"squad": ("rajpurkar/squad_v2", None), "hotpotqa": ("hotpotqa/hotpot_qa", "distractor")}
FORMS = {
    "squad": "an object with data[].paragraphs[], of a context and of qas[] with question and answers[].text each",
    "hotpotqa": "a list of objects with question, answer and context, pairs of a title and sentences",
}
"""Of the JSON files."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its references, and indices of documents: those it needs, and others of the same
    article."""

    query: str
    outputs: tuple[str, ...]
    context: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Questions and all documents, sorted, each once."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def generate(
    task: Task, tokenizer: Any, length: int, samples: int, seed: int, data: QuestionSet
) -> Iterator[tuple[str, list[str], int]]:
    """Prompts with their references and tokens; the random stream is that of the official generator.

    Raises:
        ValueError: fewer questions than samples; TooShort: the length holds not even the documents of a
            question.
    """
    if samples > len(data.questions):
        raise ValueError(f"samples={samples}: the data set of {task.name!r} has {len(data.questions)} "
                         f"questions")
    rng = random.Random(seed)

    def make(index: int, count: int) -> tuple[str, list[str]]:
        question = data.questions[index]
        chosen = _choose(rng, data, question, count)
        random.Random(seed).shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(chosen, start=1))
        return task.family.prompt.format(context=context, query=question.query), list(question.outputs)

    def tokens(text: str) -> int:
        return count_tokens(tokenizer, text) + task.new_tokens

    per_document = count_tokens(tokenizer, make(0, STEP)[0]) / STEP
    upper = max(int(length / per_document * 3), 2 * STEP)
    size = largest(STEP, upper, lambda count: tokens(make(0, count)[0]), length)
    for index in range(samples):
        yield draw(task.name, length, size, STEP, functools.partial(make, index), tokens)


def _choose(rng: random.Random, data: QuestionSet, question: Question, count: int) -> list[str]:
    """The documents of a question and as many others as make `count`, those of the same article first."""
    documents, own, related = data.documents, list(question.context), list(question.related)
    if count >= len(documents):
        repeats = -(-count // len(documents))
        return list((documents * repeats)[:count])
    if count - len(own) > len(related):
        taken = {*own, *related}
        others = [i for i in range(len(documents)) if i not in taken]
        chosen = own + related + rng.sample(others, max(0, count - len(own) - len(related)))
    else:
        chosen = own + rng.sample(related, count - len(own))
    return [documents[i] for i in chosen]


# ---- data sets ---------------------------------------------------------------------------------------------


def load_questions(dataset: str, path: str | os.PathLike | None = None) -> QuestionSet:
    """The questions of "squad" or "hotpotqa".

    Args:
        path: the JSON file that RULER downloads (SQuAD's dev-v2.0.json or dev-v1.1.json, HotpotQA's
            hotpot_dev_distractor_v1.json); by default the validation split of the hub's data set, in the same
            order.

    Raises:
        FileNotFoundError: no such file, or the hub cannot be reached; ValueError: a file of another form.
    """
    read = {"squad": read_squad, "hotpotqa": read_hotpotqa}[dataset]
    if path is None:
        return read(_from_hub(dataset))
    try:
        found = read(parse_json(read_text(path)))
        if not found.questions:
            raise ValueError("holds no question that has an answer")
        return found
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        told = str(error) if isinstance(error, ValueError) else f"expected {FORMS[dataset]}"
        raise ValueError(f"{path}: not a {dataset} file of the form that RULER reads: {told}") from error


def read_squad(data: Mapping[str, Any]) -> QuestionSet:
    """From the content of SQuAD's JSON; unanswerable questions are left out."""
    articles = [article["paragraphs"] for article in data["data"]]
    documents, index = _indexed(paragraph["context"] for paragraphs in articles for paragraph in paragraphs)
    questions = []
    for paragraphs in articles:
        members = [index[paragraph["context"]] for paragraph in paragraphs]
        for own, paragraph in zip(members, paragraphs, strict=True):
            related = tuple(i for i in members if i != own)
            questions += [
                _question(qa["question"], [a["text"] for a in qa["answers"]], (own,), related)
                for qa in paragraph["qas"] if not qa.get("is_impossible", False)
            ]
    return QuestionSet(tuple(questions), documents)


def read_hotpotqa(data: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """From the content of HotpotQA's JSON (distractor setting)."""
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in data]
    documents, index = _indexed(document for context in contexts for document in context)
    questions = tuple(
        _question(row["question"], [row["answer"]], tuple(index[document] for document in context))
        for row, context in zip(data, contexts, strict=True)
    )
    return QuestionSet(questions, documents)


def _question(query: Any, answers: list[Any], context: tuple[int, ...], related: tuple[int, ...] = ()) -> Question:
    """Checked: an empty answer is found in anything."""
    return Question(check_text("question", query), check_texts("answers", answers), context, related)


def _indexed(documents: Iterator[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    unique = tuple(sorted(set(documents)))
    return unique, {document: i for i, document in enumerate(unique)}


def _from_hub(dataset: str) -> Any:
    """The hub's validation split in the form of the published JSON file."""
    repository, config = HUB[dataset]
    check_extra("datasets", f"{repository}, a dataset of the hub")
    import datasets  # slow to import, and only needed here

    try:
        with quiet_hub():
            rows: Any = datasets.load_dataset(repository, config, split="validation")
    except (OSError, ValueError, RuntimeError) as error:
        raise FileNotFoundError(f"the data set {repository} cannot be loaded here ({error}); give the file "
                                f"that RULER downloads for "
                                f"{dataset}") from error
    if dataset == "hotpotqa":
        return [row | {"context": list(zip(row["context"]["title"], row["context"]["sentences"],
                                           strict=True))}
                for row in rows]
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        answers = [{"text": text} for text in row["answers"]["text"]]
        entry = {"question": row["question"], "answers": answers, "is_impossible": not answers}
        articles.setdefault(row["title"], {}).setdefault(row["context"], []).append(entry)
    return {"data": [{"paragraphs": [{"context": context, "qas": qas} for context, qas in article.items()]}
                     for article in articles.values()]}
