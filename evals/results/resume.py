"""Going on with a run: which records of a file are this run's."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowrank_kv_jax.evals.results.records import check_writable, read_records

Key = tuple[Any, ...]

KEY = ("command", "fingerprint", "method", "task", "length", "index", "protocol", "seed")
"""The fields of a record that name it: a file holds each at most once."""


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
    check_writable(path)
    if not Path(path).expanduser().exists():
        return {}
    found: dict[Key, dict[str, Any]] = {}
    for record in read_records(path):
        key = key_of(record)
        if key not in wanted:
            continue
        differ = [
            f"the {name.removesuffix('_sha256')} of {record['task']} sample {record['index']} is another one"
            if name.endswith("_sha256") else f"{name} was {record.get(name)!r} and is now {value!r}"
            for name, value in wanted[key].items() if record.get(name) != value
        ]
        if differ:
            raise ValueError(f"{path} holds results of another run ({'; '.join(differ)}): give another file")
        found.setdefault(key, record)
    return found
