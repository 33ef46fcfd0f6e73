"""Values as messages show them."""

import reprlib
from typing import Any


def short(value: Any) -> str:
    """In some dozens of characters of one line, whatever it is."""
    try:
        return " ".join(reprlib.repr(value).split("\n"))  # arrays have several
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "an integer of thousands of digits"
