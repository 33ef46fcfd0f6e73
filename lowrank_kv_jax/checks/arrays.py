"""Arguments that are arrays, or become NumPy's."""

from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.checks.shown import short


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
