"""Sums over windows of text that survive a killed run."""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lowrank_kv_jax.files import check_regular, expanded, replacing


class CheckpointedSums:
    """Named float64 arrays that grow window by window, kept in a file beside what they belong to.

    Args:
        path: `.npz` file, written anew after every window (never half: it is replaced in one step); None keeps nothing.
        key: what decides the sums (model, text, settings), as JSON holds it.
    """

    def __init__(self, path: str | os.PathLike | None, key: Mapping[str, Any]):
        self._path = None if path is None else expanded(path)
        self._key = json.dumps(dict(key), sort_keys=True)
        self.arrays: dict[str, np.ndarray] = {}

    def load(self) -> int:
        """Read what an earlier run left; how many windows it had finished.

        Raises:
            ValueError: the file belongs to other sums, or is none of ours.
        """
        if self._path is None or not self._path.exists():
            return 0
        check_regular(self._path)
        try:
            found = _read(self._path)
            for name in ("seal", "key", "done"):
                if name not in found:
                    raise ValueError(f"the field {name!r} is missing")
            seal = str(found.pop("seal"))
            if seal != _seal(found):
                raise ValueError(f"seal={seal:.12}: is not that of its arrays, {_seal(found):.12}")
            key, done = str(found.pop("key")), int(found.pop("done"))
        except Exception as error:  # zip, zlib and NumPy have errors of their own for what is damaged
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(f"{self._path}: no unfinished calibration ({reason}); delete it or name another") from error
        if done < 1 or not all(array.dtype == np.float64 and np.isfinite(array).all() for array in found.values()):
            raise ValueError(f"{self._path}: no unfinished calibration (done={done}: must be at least 1, and sums "
                             "finite float64); delete it or name another")
        if key != self._key:
            raise ValueError(f"{self._path}: holds the unfinished calibration of {key}, not of {self._key}; delete it or "
                             "name another")
        self.arrays = found
        return done

    def add(self, name: str, array: np.ndarray) -> None:
        """Add to the sum of that name."""
        self.arrays[name] = self.arrays[name] + array if name in self.arrays else np.asarray(array, np.float64)

    def save(self, done: int) -> None:
        """Keep the sums over the first `done` windows."""
        if self._path is None:
            return
        held = {"key": np.array(self._key), "done": np.array(done), **self.arrays}
        with replacing(self._path) as file:
            np.savez(file, seal=np.array(_seal(held)), **held)  # type: ignore[arg-type]

    def discard(self) -> None:
        """Delete the file: the work is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _seal(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of named arrays: a sum that is missing would be taken for one that is still to come."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` file, none of them larger than the file: they are stored as they are."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        if any(entry.file_size > size for entry in archive.infolist()):
            raise ValueError("an array is larger than the file")
    with np.load(path, allow_pickle=False) as held:
        return {name: held[name] for name in held.files}
