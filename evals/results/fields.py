"""Checks of fields that are read from files: a mistake is told with its value and with what is allowed."""

from typing import Any

from lowrank_kv_jax.checks.shown import short

MOST = 1e15
"""Of a number in a record: sums and squares of several stay exact enough, and finite."""


def wrong(field: str, value: Any, allowed: str) -> ValueError:
    """The error; long values are shortened."""
    return ValueError(f"{field}={short(value)}: expected {allowed}")


def check_text(field: str, value: Any) -> str:
    """Raise ValueError unless the value is a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise wrong(field, value, "a string that is not empty")
    return value


def check_texts(field: str, value: Any) -> tuple[str, ...]:
    """Raise ValueError unless the value is a list of at least one string, none of them empty."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise wrong(field, value, "a list of at least one string, none of them empty")
    return tuple(value)


def check_choice(field: str, value: Any, count: int) -> int:
    """Raise ValueError unless the value is the number of one of `count` choices, from 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise wrong(field, value, f"a number in 0..{count - 1}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value of a record can be counted with: a finite number of at most `MOST`, and not true or false."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -MOST <= value <= MOST  # of NaN neither holds
