"""Values as messages show them, and texts that cannot be shown."""

import reprlib
from typing import Any


def short(value: Any) -> str:
    """In some dozens of characters of one line, whatever it is."""
    try:
        return " ".join(reprlib.repr(value).split("\n"))  # arrays have several
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "an integer of thousands of digits"


def check_text(name: str, text: str, sign: str = "=") -> None:
    """Raise ValueError where a text holds half of a surrogate pair, which no UTF-8 has and no tokenizer takes.

    Args:
        sign: between name and text, as the caller wrote them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}{sign}{short(text)}: is not UTF-8 text, character {error.start} is half of a surrogate "
                         "pair") from error
