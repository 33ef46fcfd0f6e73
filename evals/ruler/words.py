"""The word lists that RULER draws from: those of wonderwords 3.0.1."""

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from lowrank_kv_jax.checks.extras import check_extra


@functools.cache
def word_list(kind: str) -> tuple[str, ...]:
    """Words of one kind in the order of wonderwords' file: "noun", "adjective" or "verb".

    Raises:
        ValueError: wonderwords is not installed.
    """
    import importlib.resources

    check_extra("wonderwords", "RULER's word lists")
    assets = importlib.resources.files("wonderwords.assets")
    lines = assets.joinpath(f"{kind}list.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.rstrip() for line in lines)


@functools.cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted, each once."""
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


class AdjectiveNouns(Sequence[str]):
    """All "adjective-noun" pairs, sorted, each once: a sequence of millions that is never built.

    Pairs of one adjective stand together, unless adjectives hold hyphens themselves and one continues another
    ("blue", "blue-eyed"): the pairs of such a family are merged.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]):
        self._nouns = sorted(set(nouns))
        self._families: list[tuple[str, ...] | list[str]] = []
        for prefix, members in itertools.groupby(sorted({f"{a}-" for a in adjectives}), _Family()):
            family = list(members)
            merged = [] if len(family) == 1 else sorted({m + noun for m in family for noun in self._nouns})
            self._families.append(merged or (prefix,))
        sizes = (len(f) if isinstance(f, list) else len(self._nouns) for f in self._families)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        which = bisect.bisect_right(self._ends, index)
        family = self._families[which]
        offset = index - (self._ends[which - 1] if which else 0)
        return family[offset] if isinstance(family, list) else family[0] + self._nouns[offset]


class _Family:
    """The key of `groupby`: the last prefix that the current one does not continue."""

    root: str | None = None

    def __call__(self, prefix: str) -> str:
        if self.root is None or not prefix.startswith(self.root):
            self.root = prefix
        return self.root


@functools.cache
def adjective_nouns() -> AdjectiveNouns:
    """Of wonderwords' lists."""
    return AdjectiveNouns(word_list("adjective"), word_list("noun"))
