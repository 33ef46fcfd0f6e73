"""Arguments that are arrays, or become NumPy's."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.checks.shown import short


def is_row(value: Any) -> bool:
    """Whether a value is one thing after the other: a sequence, no text and no bytes, or an array of one dimension."""
    if isinstance(value, jax.Array | np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def array_of(name: str, value: Any) -> jax.Array | np.ndarray:
    """An array as it is, and NumPy's of lists and numbers.

    Raises:
        ValueError: lists that are no array, such as rows of different lengths.
    """
    if isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}={short(value)}: must be an array, all rows of one length") from error
