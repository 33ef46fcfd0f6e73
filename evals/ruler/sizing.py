"""How much haystack fits a length: the official search, ending with an error where the official one never
ends."""

from collections.abc import Callable, Sequence
from typing import Any

ATTEMPTS = 20
"""How often a sample is drawn again at the smallest size before its length is called too short."""


class TooShort(ValueError):
    """No sample of a task fits the length that was asked for."""


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a text, those that open or close a sequence not counted."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def largest(lower: int, upper: int, tokens: Callable[[int], int], limit: int) -> int:
    """The largest size in lower..upper whose trial sample takes at most `limit` tokens, by bisection; else
    `lower`."""
    best = lower
    while lower <= upper:
        middle = (lower + upper) // 2
        if tokens(middle) <= limit:
            best, lower = middle, middle + 1
        else:
            upper = middle - 1
    return best


def draw(
    task: str, length: int, size: int, step: int, make: Callable[[int], tuple[str, Sequence[str]]],
    tokens: Callable[[str], int],
) -> tuple[str, list[str], int]:
    """Draw a sample of at most `size` pieces of haystack, `step` fewer each time that it does not fit.

    Args:
        make: draws a prompt and its references from so many pieces; ValueError where there are too few.
        tokens: of a prompt, the reserved answer included.

    Returns:
        Prompt, references and tokens.

    Raises:
        TooShort: even the smallest size does not fit.
    """
    shortest, left = None, ATTEMPTS
    while left:
        try:
            text, outputs = make(size)
        except ValueError:  # fewer places than needles, fewer documents than the question needs
            taken = None
        else:
            taken = tokens(text)
            if taken <= length:
                return text, list(outputs), taken
            shortest = taken if shortest is None else min(shortest, taken)
        if size > step:
            size -= step
        else:
            left -= 1
    found = "no sample can be made" if shortest is None else f"the shortest sample drawn takes {shortest} tokens"
    raise TooShort(f"length={length} is below the floor of RULER task {task!r}: {found}, the answer included")
