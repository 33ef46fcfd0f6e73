"""Going on with a run: which records of a file are this run's."""

import os
from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.evals.results.fields import MOST, is_number
from lowrank_kv_jax.evals.results.records import check_appendable, read_records
from lowrank_kv_jax.files import expanded

Key = tuple[Any, ...]

KEY = ("command", "fingerprint", "method", "task", "length", "index", "protocol", "seed")
"""The fields of a record that name it: of several in a file, the last counts."""


def key_of(record: Mapping[str, Any]) -> Key:
    """What names a record."""
    return tuple(record.get(field) for field in KEY)


def finished(path: str | os.PathLike, wanted: Mapping[Key, Mapping[str, Any]]) -> dict[Key, dict[str, Any]]:
    """The records of a file that are this run's, by key.

    Args:
        wanted: of each key of the run, the conditions that its record must have been made under.

    Raises:
        ValueError: a record of the same key was made under other conditions; OSError: the file cannot be written.
    """
    check_appendable(path)
    if not expanded(path).exists():
        return {}
    found: dict[Key, dict[str, Any]] = {}
    for record in read_records(path):
        key = key_of(record)
        if any(isinstance(value, dict | list) for value in key) or key not in wanted:
            continue
        differ = [
            f"the {name.removesuffix('_sha256')} of {record['task']} sample {record['index']} is another one"
            if name.endswith("_sha256") else f"{name} was {short(record.get(name))} and is now {short(value)}"
            for name, value in wanted[key].items() if record.get(name) != value
        ]
        if differ:
            raise ValueError(f"{path} holds results of another run ({'; '.join(differ)}): give another file")
        _check_result(path, record)
        found[key] = record
    return found


_RESULT = ("score", "nll", "scored_tokens", "cache_bytes", "shared_bytes", "full_cache_bytes", "smaller")


def _check_result(path: str | os.PathLike, record: Mapping[str, Any]) -> None:
    """Raise ValueError where a record of this run lacks what tables are made of, or holds no number there."""
    place = f"{path}: the record of {record['method']}, {record['task']}, index {record['index']}"
    for field in _RESULT:
        value = record.get(field)
        if value is not None and not is_number(value):
            raise ValueError(f"{place}: {field}={short(value)}: must be a number of at most {MOST:g}")
    scored_tokens = record.get("scored_tokens") or 0
    if record.get("score") is None and not ("nll" in record and scored_tokens > 0):
        raise ValueError(f"{place}: has neither a score nor a likelihood (nll, scored_tokens); delete its line")
