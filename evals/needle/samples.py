"""A single needle in a haystack of noise, in the form of RULER's `niah_single_1` (Hsieh et al., 2024)."""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

TASK = "niah_single_1"
RESERVE = 128
"""Tokens that RULER reserves for the answer; they count towards the length."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic number for {key} mentioned in the provided text is"

ADJECTIVES = (
    "amber ancient awake bitter bold brave brief bright brisk broad calm careful cheerful clever cloudy "
    "cold crisp curious damp dark deep eager early empty fair famous fancy fierce gentle giant glad "
    "golden grand hollow honest humble icy jolly keen kind large late lively lonely loud lucky mellow "
    "mild narrow neat noble odd pale patient plain polite proud quick quiet rapid rare ripe rough round "
    "royal rusty salty sharp shiny silent simple sleepy smooth soft solid spare steady steep strange "
    "sturdy sweet swift tall tender tidy tiny vast warm wild wise young"
).split()
NOUNS = (
    "acorn anchor anvil apple arrow badge bakery barrel basket beacon bell blanket bottle bridge bucket "
    "button cabin candle canoe carpet castle cellar chapel cherry circle clock cloud coast collar copper "
    "corner cottage cradle cricket crown dancer desert diamond drawer eagle engine fabric falcon feather "
    "ferry fiddle forest fountain garden glacier guitar hammer harbor harvest helmet island jacket kettle "
    "kitten ladder lantern lemon library lizard magnet market meadow mirror mountain museum needle "
    "orchard paddle parrot pebble pencil pepper pillow planet pocket puzzle rabbit ribbon river saddle "
    "sailor shelter silver spider station stream sunset temple thunder ticket tunnel valley village "
    "violin wagon walnut whistle window winter"
).split()


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question, split where a query-agnostic cache is compressed.

    Attributes:
        context: everything before the last question line, its line break included.
        question: the question line, followed directly by the answer prefix.
        outputs: the references.
        length: tokens of context, question and reserved answer together.
        depth: where in the haystack the needle lies, 0 first and 1 last.
    """

    context: str
    question: str
    outputs: tuple[str, ...]
    length: int
    depth: float


def make_needle(
    tokenizer: Any, length: int, seed: int = 0, index: int = 0, depth: float | None = None,
    reserve: int = RESERVE,
) -> Sample:
    """The sample `index` of a seed, as long as fits: context, question, answer prefix and `reserve` tokens <=
    length.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        length: tokens in all.
        seed, index: everything random follows from these two and from `length`.
        depth: where the needle goes, 0 to 1; drawn uniformly where it is None.
        reserve: tokens kept free for the answer.

    Raises:
        ValueError: no room for a single sentence of noise, or a depth outside of 0..1.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth={depth}: must lie in 0..1")
    rng = random.Random(f"{TASK} {seed} {length} {index}")
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    value = str(rng.randint(10**6, 10**7 - 1))
    where = rng.random()
    where = where if depth is None else depth

    def sample(sentences: int) -> Sample:
        at = min(math.floor(where * sentences), sentences)
        lines = [NOISE] * sentences
        lines.insert(at, NEEDLE.format(key=key, value=value))
        context = "\n".join([INSTRUCTION, *lines, ""])
        question = QUESTION.format(key=key) + ANSWER_PREFIX.format(key=key)
        tokens = len(tokenizer.encode(context + question)) + reserve
        return Sample(context, question, (value,), tokens, at / sentences)

    return _longest(sample, length)


def substring_score(answer: str, outputs: tuple[str, ...]) -> float:
    """Share of the references that the answer contains, case-insensitively (RULER's `string_match_all`)."""
    return sum(reference.lower() in answer.lower() for reference in outputs) / len(outputs)


def _longest(sample: Callable[[int], Sample], length: int) -> Sample:
    """Binary search for the most sentences whose sample is no longer than `length`."""
    best = sample(1)
    if best.length > length:
        raise ValueError(f"length={length}: the shortest {TASK} sample takes {best.length} tokens, with "
                         "its answer")
    low, high = 1, 2
    while (longer := sample(high)).length <= length:
        best, low, high = longer, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        trial = sample(middle)
        if trial.length <= length:
            best, low = trial, middle
        else:
            high = middle
    return best
