"""The text of an answer as it grows: nothing is shown that may have to be taken back."""

from collections.abc import Sequence
from typing import Any


class Words:
    """What is new in a text of tokens.

    Half of a character waits for the rest, and so does what may become a text that ends the answer. All pieces put
    together are the text that the answer has in the end.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        stops: texts that end the answer.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer, self._stops, self._shown = tokenizer, stops, 0

    def add(self, tokens: Sequence[int]) -> str:
        """What can be shown of all tokens so far, and was not yet."""
        text = self._tokenizer.decode(list(tokens)).rstrip("\ufffd")
        return self._show(text[: len(text) - self._begun(text)])

    def end(self, text: str) -> str:
        """The rest of the whole text."""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _begun(self, text: str) -> int:
        """Characters at the end of a text that a stop begins with, the most that do."""
        most = max(map(len, self._stops), default=1) - 1
        return next((n for n in range(min(most, len(text)), 0, -1)
                     if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
