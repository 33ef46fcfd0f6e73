"""Figures against the length of contexts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.report.sections import Section
from lowrank_kv_jax.evals.report.styles import families, legend, style
from lowrank_kv_jax.evals.report.times import Line, times_by_rows


def draw_by_length(plt: Any, lines: Mapping[str, Line], label: str, title: str) -> Any:
    """A line for each method."""
    figure, axis = plt.subplots(figsize=(6.4, 3.8 + 0.07 * len(lines)), layout="constrained")
    _plot(axis, lines, list(lines))
    axis.set(xlabel="tokens", ylabel=label, title=title)
    legend(figure, list(families(list(lines))))
    return figure


def draw_all_by_length(plt: Any, sections: Sequence[Section]) -> Any:
    """Quality, bytes and decode speed side by side; None for a single length.

    Args:
        sections: of one benchmark; of several sizes of batches, the speed of the one with the most points is drawn.
    """
    same = [section for section in sections if isinstance(section.length, int)]
    if len({section.length for section in same}) < 2:
        return None
    scores, sizes = quality_by_length(same), bytes_by_length(same)
    speeds = times_by_rows(same, "decode_tokens_per_s")
    rows = max(speeds, key=lambda rows: sum(map(len, speeds[rows].values())), default=None)
    panels = [("mean score", scores), *([("cache, MiB a row", sizes)] if sizes else [])]
    if speeds:
        batch = "" if rows is None else f", rows in a batch: {rows}"
        panels.append((f"tokens per second{batch}", speeds[rows]))
    methods = list(scores)
    size = (3.6 * len(panels), 3.4 + 0.07 * len(methods))
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, (label, lines) in zip(axes[0], panels, strict=True):
        _plot(axis, lines, methods)
        axis.set(xlabel="tokens", ylabel=label)
    axes[0, 0].set_ylim(-4, 104)
    figure.suptitle(f"{same[-1].command}, {same[-1].model}", fontsize=10)
    legend(figure, list(families(methods)), axes[0, 0])
    return figure


def quality_by_length(sections: Sequence[Section]) -> dict[str, Line]:
    """Mean scores of each method, by length."""
    found: dict[str, dict[int, float]] = {}
    for section in sections:
        for entry in section.entries:
            found.setdefault(entry.method, {})[section.length] = entry.mean.mean
    return {method: sorted(line.items()) for method, line in found.items()}


def bytes_by_length(sections: Sequence[Section]) -> dict[str, Line]:
    """MiB of a row's cache with its bases, the mean over records, by length; of methods whose records say so."""
    found: dict[str, dict[int, list[float]]] = {}
    for section in sections:
        for record in section.records:
            if record.get("cache_bytes"):
                cell = found.setdefault(record["method"], {}).setdefault(section.length, [])
                cell.append(record["cache_bytes"] / 2**20)
    return {method: [(length, float(np.mean(sizes))) for length, sizes in sorted(line.items())]
            for method, line in found.items()}


def _plot(axis: Any, lines: Mapping[str, Line], methods: Sequence[str]) -> None:
    """Lines of methods in the styles that they have among all; each family is named once."""
    for number, (family, members) in enumerate(families(methods).items()):
        for member in members:
            line = lines.get(methods[member])
            if line:
                axis.plot(*zip(*line, strict=True), **style(number, family), alpha=0.85,
                          label=family if member == members[0] else None)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
