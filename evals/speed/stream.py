"""A stream of requests to serve: needles in contexts of many lengths, some of which several requests share."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowrank_kv_jax.evals.needle.samples import ADJECTIVES, ANSWER_PREFIX, INSTRUCTION, NEEDLE, NOISE, NOUNS, QUESTION

Ids = tuple[int, ...]


class Asked(NamedTuple):
    """A request.

    Attributes:
        context: compressed before the question is seen.
        question: ids that follow it.
        answer: what a right answer holds.
        shared: whether other requests have the same context.
    """

    context: Ids
    question: Ids
    answer: str
    shared: bool


def make_stream(tokenizer: Any, requests: int, lengths: tuple[int, int], asked: int, seed: int) -> list[Asked]:
    """Half of the requests share their contexts, `asked` of them each; the others have contexts of their own.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        lengths: tokens of a context, from and to, drawn uniformly.
        asked: requests that share a context, 1 for none.

    Raises:
        ValueError: lengths that are none, or too short for so many needles.
    """
    least, most = lengths
    if least > most:
        raise ValueError(f"lengths={least} {most}: the first must be at most the second")
    rng, stream = random.Random(f"serve {seed}"), []
    while len(stream) < requests:
        for needles in (asked, *(1,) * asked):
            stream += _of_one_context(tokenizer, lengths, needles, rng)
    stream = stream[:requests]
    rng.shuffle(stream)
    return stream


def _of_one_context(tokenizer: Any, lengths: tuple[int, int], needles: int, rng: random.Random) -> list[Asked]:
    length = rng.randint(*lengths)
    names = rng.sample([f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS], needles)
    values = {key: str(rng.randint(10**6, 10**7 - 1)) for key in names}
    places = [rng.random() for _ in names]

    def ids(sentences: int) -> Ids:
        lines = [NOISE] * sentences
        for key, place in zip(names, places, strict=True):
            lines.insert(int(place * (len(lines) + 1)), NEEDLE.format(key=key, value=values[key]))
        return tuple(tokenizer("\n".join([INSTRUCTION, *lines, ""])).input_ids)

    context = _longest(ids, length)
    if len(context) > length:
        raise ValueError(f"lengths={lengths[0]} {lengths[1]}: too few tokens, the needles of a context alone take "
                         f"{len(context)}")
    questions = [QUESTION.format(key=key) + ANSWER_PREFIX.format(key=key) for key in names]
    tails = (tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in questions)
    return [Asked(context, tail, values[key], needles > 1) for key, tail in zip(names, tails, strict=True)]


def _longest(ids: Any, length: int) -> Ids:
    """The ids of as many sentences as fit; where not even the needles do, of these."""
    none, ten = len(ids(0)), len(ids(10))
    sentences = max((length - none) * 10 // max(ten - none, 1), 0)
    while sentences and len(ids(sentences)) > length:
        sentences -= 1
    return ids(sentences)


def room_for(stream: Sequence[Asked], new_tokens: int) -> int:
    """Tokens behind a context."""
    return max(len(one.question) for one in stream) + new_tokens
