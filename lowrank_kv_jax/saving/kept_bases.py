"""Bases that a command calibrated, kept for the next one: calibration takes minutes, and evaluations ask again and again.

They lie in the user's cache directory, by all that decides them, those of this library's source files included that a
calibration may run: one that was changed calibrates anew, and methods of other packages always do. Whoever wants bases
in a place of their own calls `calibrate` and `save_bases`.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.files import user_cache_directory
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.saving.checkpoint import discard
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases

MOST = 64
"""Entries; beyond them those go that were used longest ago."""
AFTERWARDS = frozenset({"cli", "evals", "serving", "testing"})
"""Folders of this package that no calibration runs."""
_NAME = re.compile(r"[0-9a-f]{32}")
"""Of an entry; whatever else lies beside them is somebody's."""


class KeptBases:
    """Bases of a model, a corpus and settings, by method.

    Args:
        settings: what else decides them, as JSON holds it (window length, seed).
        dtype: of the bases.
    """

    def __init__(self, model: Any, corpus: Corpus, settings: Mapping[str, Any], dtype: Any):
        self._model, self._corpus, self._settings = model, corpus, dict(settings)
        self._dtype = jnp.dtype(dtype).name

    def find(self, method: Part) -> tuple[Any, ...] | None:
        """Those of an earlier command; None where there are none. What is damaged is deleted."""
        path = self._path(method)
        if not _may_be_kept(method) or not path.is_dir():
            return None
        try:
            found = load_bases(path, self._model, method)
        except (OSError, ValueError):
            discard(path)
            return None
        with contextlib.suppress(OSError):  # a cache that may only be read serves as well
            os.utime(path)
        return found

    def keep(self, method: Part, bases: tuple[Any, ...]) -> None:
        """Keep them if that is possible: no place, a full disk or another process that does the same are no errors."""
        path = self._path(method)
        if not _may_be_kept(method):
            return
        with contextlib.suppress(OSError, ValueError):  # ValueError: nothing that could be saved
            path.parent.mkdir(parents=True, exist_ok=True)
            save_bases(path, bases, self._model, method, corpus=self._corpus, settings=self._settings)
            _drop_oldest(path.parent)

    def _path(self, method: Part) -> Path:
        spec = self._model.config.attention
        key = {"fingerprint": self._model.fingerprint, "weights": weights_dtype(self._model),
               "corpus": self._corpus.sha256, "settings": self._settings, "dtype": self._dtype,
               "fit": method.fit_key(spec), "sources": _sources()}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return user_cache_directory() / "bases" / digest[:32]


def _may_be_kept(method: Part) -> bool:
    """Of parts whose source is known, in one process: several must not find different things."""
    package = __name__.partition(".")[0]
    own = all(type(part).__module__.partition(".")[0] == package for part in machine_of(method).parts)
    return own and jax.process_count() == 1


def _drop_oldest(directory: Path) -> None:
    own = [entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)]
    entries = sorted(own, key=lambda entry: entry.stat().st_mtime)
    for entry in entries[:-MOST]:
        discard(entry)


@functools.cache
def _sources() -> str:
    """SHA-256 of those of this package's Python files that a calibration may run."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] not in AFTERWARDS:
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
