"""What needles are hidden in: the noise sentence, or essays cut into words."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence

from lowrank_kv_jax.calibration.corpus import load_corpus

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

HUB_ESSAYS = "sgoel9/paul_graham_essays"


def split_sentences(text: str) -> list[str]:
    """Sentences, cut after each full stop, question or exclamation mark that white space follows.

    The official generator cuts with nltk's punkt model, which has to be downloaded; `Essay` takes any
    function.
    """
    return re.split(r"(?<=[.!?])\s+", text)


@dataclasses.dataclass(frozen=True)
class Essay:
    """A text as RULER hides needles in it.

    Attributes:
        words: the text, cut at white space.
        sentences: cuts a text into sentences.
    """

    words: tuple[str, ...]
    sentences: Callable[[str], Sequence[str]] = split_sentences

    @classmethod
    def of(cls, text: str, sentences: Callable[[str], Sequence[str]] = split_sentences) -> "Essay":
        """From a text.

        Raises:
            ValueError: a text of nothing but white space.
        """
        if not text.strip():
            raise ValueError("the haystack holds no text")
        return cls(tuple(re.sub(r"\s+", " ", text).split(" ")), sentences)

    def first(self, count: int) -> str:
        """The first `count` words, from the beginning again where the text ends."""
        repeats = -(-count // len(self.words))
        return " ".join((self.words * max(repeats, 1))[:count])


def load_haystack(source: str | os.PathLike | Sequence[str | os.PathLike] | None = None) -> str:
    """The text of a haystack.

    Args:
        source: as `load_corpus` takes it: files, built-in names or datasets of the hub; by default "pydoc",
            Python's own language reference, which is always there. `HUB_ESSAYS` names the essays that RULER
            was published with.

    Raises:
        FileNotFoundError, ValueError: as `load_corpus`.
    """
    return "\n".join(load_corpus(source).texts)
