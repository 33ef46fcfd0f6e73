"""Means over records: scores, sizes and times of each method."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]


def mean_scores(records: Sequence[Record]) -> dict[str, dict[tuple[Any, str], float]]:
    """By method and by (length, task), methods in the order of the records."""
    scores: dict[str, dict[tuple[Any, str], list[float]]] = {}
    for record in records:
        if record.get("score") is not None:
            cell = scores.setdefault(record["method"], {}).setdefault((record["length"], record["task"]), [])
            cell.append(record["score"])
    return {
        method: {key: float(np.mean(cell)) for key, cell in cells.items()} for method, cells in scores.items()
    }


def mean_smaller(records: Sequence[Record], method: str, apart: bool = False) -> float | None:
    """How many times smaller than a 16-bit full cache: all bytes of the full caches over all bytes stored.

    Args:
        apart: bases that all requests share are left out; None where nothing else is stored.
    """
    own = [r for r in records if r["method"] == method and r.get("cache_bytes") and r.get("full_cache_bytes")]
    stored = sum(r["cache_bytes"] - (r.get("shared_bytes") or 0 if apart else 0) for r in own)
    return sum(r["full_cache_bytes"] for r in own) / stored if stored > 0 else None


SIZE_HEADS = ("x smaller", "bases apart")


def size_texts(records: Sequence[Record], method: str) -> tuple[str, str]:
    """For tables, under `SIZE_HEADS`: all bytes, and without the bases that all requests share."""
    all_bytes, apart = (
        "" if smaller is None else f"{smaller:.2f}"
        for smaller in (mean_smaller(records, method), mean_smaller(records, method, apart=True))
    )
    return all_bytes, apart
