"""Eigenvectors on the host, in float64: of one matrix once where several methods are fitted to the same moments."""

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

_KNOWN: contextvars.ContextVar[dict[bytes, tuple[np.ndarray, np.ndarray]] | None] = contextvars.ContextVar(
    "known", default=None)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Within it, `host_eigh` keeps what it found: the bases of one model at several sizes have the same directions."""
    token = _KNOWN.set({})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def host_eigh(
    matrices: Float[np.ndarray, "*lead W W"]
) -> tuple[Float[np.ndarray, "*lead W"], Float[np.ndarray, "*lead W W"]]:
    """Ascending eigenvalues and eigenvectors, in columns, of symmetric matrices; not to be written to."""
    known = _KNOWN.get()
    if known is None:
        values, vectors = np.linalg.eigh(matrices)
        return values, vectors
    digest = hashlib.sha256(f"{matrices.shape}{matrices.dtype}".encode())
    digest.update(np.ascontiguousarray(matrices).data)
    key = digest.digest()
    if key not in known:
        values, vectors = np.linalg.eigh(matrices)
        known[key] = values, vectors
    return known[key]
