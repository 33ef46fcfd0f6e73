"""What tells the weights of a decoder of your own from others."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.storage.sharding import to_host


def fingerprint_of(weights: Any) -> tuple[str, str]:
    """A name to show, and a SHA-256: of a text that stands for the weights, or of names, shapes, dtypes and numbers of
    a pytree of arrays, wherever they lie.

    Raises:
        ValueError: an empty text, no arrays, or a leaf that is not numbers.
    """
    if isinstance(weights, str) and weights:
        return weights, hashlib.sha256(weights.encode()).hexdigest()
    leaves = [] if isinstance(weights, str) else jax.tree_util.tree_leaves_with_path(weights)
    if not leaves:
        raise ValueError(f"weights={short(weights)}: must be a pytree of arrays, or a text that stands for them")
    digest = hashlib.sha256()
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        array: Any = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
            raise ValueError(f"weights{name}: is of {array.dtype}, must be numbers; leave it out, or give a text that "
                             "stands for the weights")
        digest.update(f"{name}{array.dtype.name}{list(array.shape)}".encode())
        digest.update(np.ascontiguousarray(to_host(array)).tobytes())
    return "weights", digest.hexdigest()
