"""Values as messages show them."""

import reprlib
from typing import Any


def short(value: Any) -> str:
    """In some dozens of characters, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "an integer of thousands of digits"
