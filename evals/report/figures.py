"""Figures of a section: quality against bytes, tasks, needles, times."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowrank_kv_jax.evals.report.by_length import draw_all_by_length, draw_by_length
from lowrank_kv_jax.evals.report.perplexities import PerplexitySection
from lowrank_kv_jax.evals.report.sections import Section
from lowrank_kv_jax.evals.report.styles import MANY
from lowrank_kv_jax.evals.report.styles import families as _families
from lowrank_kv_jax.evals.report.styles import legend as _legend
from lowrank_kv_jax.evals.report.styles import style as _style
from lowrank_kv_jax.evals.report.times import times_by_rows
from lowrank_kv_jax.evals.results.fields import is_number
from lowrank_kv_jax.evals.results.figure_file import pyplot, save_figure
from lowrank_kv_jax.files import expanded


def draw_figures(
    sections: Sequence[Section | PerplexitySection], folder: str | os.PathLike
) -> dict[str, list[tuple[str, Path]]]:
    """Draw all figures that the records allow, as PNG.

    Returns:
        By the title of a section, captions and files.
    """
    plt = pyplot()

    folder = expanded(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, list[tuple[str, Path]]] = {}
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with plt.rc_context(style):
        scored = [section for section in sections if isinstance(section, Section)]
        for number, section in enumerate(sections, start=1):
            figures = drawn.setdefault(section.title, [])
            if isinstance(section, PerplexitySection):
                caption = "Perplexity against bytes; bars are 95% bootstrap intervals over windows"
                figure = _perplexity(plt, section)
                if figure is not None:
                    figures.append((caption, _save(plt, figure, folder / f"{number}-perplexity.png")))
                continue
            for name, caption, draw in (
                ("pareto", "Quality against bytes; bars are 95% bootstrap intervals, the line is the Pareto "
                           "front", _pareto),
                ("tasks", "Score of each task", _tasks),
                ("needles", "Needles found by depth and length", _needles),
            ):
                figure = draw(plt, section, scored)
                if figure is not None:
                    figures.append((caption, _save(plt, figure, folder / f"{number}-{name}.png")))
        for benchmark in dict.fromkeys(s.benchmark for s in scored):
            same = [s for s in scored if s.benchmark == benchmark]
            figure = draw_all_by_length(plt, same)
            if figure is not None:
                path = folder / f"{1 + list(sections).index(same[-1])}-lengths.png"
                caption = "Quality, bytes and decode speed against length"
                drawn[same[-1].title].append((caption, _save(plt, figure, path)))
        for name, caption, field, label in (
            ("ttft", "Time to first token of a batch against length", "ttft_s", "seconds"),
            ("throughput", "Decoding of a batch against length", "decode_tokens_per_s", "tokens per second"),
        ):
            for benchmark in dict.fromkeys(s.benchmark for s in scored):
                same = [s for s in scored if s.benchmark == benchmark]
                for rows, lines in times_by_rows(same, field).items():
                    figure = draw_by_length(plt, lines, label, f"{same[-1].command}, {same[-1].model}")
                    suffix, counted = ("", "") if rows is None else (f"-{rows}", f", rows in a batch: {rows}")
                    path = folder / f"{1 + list(sections).index(same[-1])}-{name}{suffix}.png"
                    drawn[same[-1].title].append((caption + counted, _save(plt, figure, path)))
    return drawn


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both bytes (fewer) and score (more), by bytes."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def _save(plt, figure, path: Path) -> Path:
    save_figure(figure, path, 160)
    plt.close(figure)
    return path


def _far_apart(front: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points of a front, from the best down, whose texts do not lie on each other."""
    shown = [front[-1]]
    for point in reversed(front):
        if shown[-1][0] - point[0] > 0.03 * front[-1][0]:
            shown.append(point)
    return shown


def _settings(method: str) -> str:
    """What tells a method from others of its family."""
    return " ".join(fields for part in method.split("+") if (fields := part.partition(":")[2]))


def _pareto(plt, section: Section, _):
    entries = [entry for entry in section.entries if entry.bytes_per_token is not None]
    if not entries:
        return None
    families = _families([entry.method for entry in entries])
    if len(entries) > MANY:  # so that the legend is read from the best down
        families = dict(sorted(families.items(), key=lambda of: -max(entries[i].mean.mean for i in of[1])))
    figure, axis = plt.subplots(figsize=(6.4, 4.0 + 0.12 * len(families)), layout="constrained")
    for number, (family, members) in enumerate(families.items()):
        own = sorted((((entries[i].bytes_per_token or 0) / 1024, entries[i].mean) for i in members), key=lambda at: at[0])
        means = [mean for _, mean in own]
        low = [mean.mean if mean.low is None else mean.low for mean in means]
        high = [mean.mean if mean.high is None else mean.high for mean in means]
        middle = np.array([mean.mean for mean in means])
        axis.errorbar([x for x, _ in own], middle, [middle - low, high - middle], **_style(number, family),
                      markersize=8 if len(families) <= MANY else 5, alpha=0.85, linewidth=0.8,
                      capsize=3 if len(families) <= MANY else 0, linestyle=":" if len(own) > 1 else "none", label=family)
    points = {((entry.bytes_per_token or 0) / 1024, entry.mean.mean): entry.method for entry in entries}
    front = pareto_front(list(points))
    if len(entries) > MANY:  # a colour is of a method there: the front says which settings
        for point in _far_apart(front):
            axis.annotate(_settings(points[point]), point, (1, 4), textcoords="offset points", fontsize=6, rotation=60)
    axis.step(*zip(*front, strict=True), where="post", color="0.6", linewidth=1, linestyle="--", zorder=0)
    axis.set(xlabel="cache, KiB per token", ylabel="mean score", ylim=(-4, 104), title=section.title)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    _legend(figure, list(families))
    return figure


def _perplexity(plt, section: PerplexitySection):
    entries = [entry for entry in section.entries
               if entry.bytes_per_token is not None and math.isfinite(entry.perplexity.mean)]
    if not entries:
        return None
    from matplotlib.ticker import LogFormatter

    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for number, entry in enumerate(entries):
        mean, error = entry.perplexity, None
        if mean.low is not None and mean.high is not None and math.isfinite(mean.high):
            error = [[mean.mean - mean.low], [mean.high - mean.mean]]
        axis.errorbar((entry.bytes_per_token or 0) / 1024, mean.mean, error, **_style(number, entry.method),
                      markersize=8, alpha=0.85, capsize=3, linestyle="none", label=entry.method)
    axis.set(xlabel="cache, KiB per token", ylabel="perplexity", yscale="log")
    for formatted in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatted(LogFormatter(labelOnlyBase=False))  # 6.64, where methods are close, and not 6.64 x 10^0
    axis.set_title(section.title, fontsize=8)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3, which="both")
    _legend(figure, [entry.method for entry in entries])
    return figure


def _tasks(plt, section: Section, _):
    if len(section.tasks) < 2:
        return None
    if len(section.entries) > MANY:
        return _task_map(plt, section)
    count, width = len(section.entries), 0.8 / len(section.entries)
    figure, axis = plt.subplots(figsize=(max(6.4, 0.25 * count * len(section.tasks)), 3.8),
                                layout="constrained")
    places = np.arange(len(section.tasks))
    for number, entry in enumerate(section.entries):
        heights = [entry.tasks.get(task, 0.0) for task in section.tasks]
        color = _style(number, entry.method)["color"]
        axis.bar(places + (number - (count - 1) / 2) * width, heights, width, color=color, label=entry.method)
    axis.set(ylabel="score", ylim=(0, 104), title=section.title)
    axis.set_xticks(places, section.tasks, rotation=30, ha="right")
    axis.grid(axis="y", alpha=0.3)
    _legend(figure, [entry.method for entry in section.entries])
    return figure


def _task_map(plt, section: Section):
    """Score of every method in every task as a map, the best first."""
    entries = sorted(section.entries, key=lambda entry: -entry.mean.mean)
    columns = [*section.tasks, "mean"]
    grid = np.array([[*(entry.tasks.get(task, np.nan) for task in section.tasks), entry.mean.mean] for entry in entries])
    size = (3.2 + 0.75 * len(columns), 1.6 + 0.2 * len(entries))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axis.set_yticks(range(len(entries)), [entry.method for entry in entries], fontsize=7)
    for (i, j), score in np.ndenumerate(grid):
        if np.isfinite(score):
            axis.text(j, i, f"{score:.0f}", ha="center", va="center", fontsize=6, color="w" if score < 60 else "k")
    return figure


def _needles(plt, section: Section, sections: Sequence[Section]):
    """A map of depth by length for each method, once for all lengths: with the first section."""
    same = [s for s in sections if s.benchmark == section.benchmark]
    records = [record for s in same for record in s.records
               if is_number(record.get("depth")) and is_number(record.get("length"))]
    return _needle_maps(plt, records) if same[0] is section and records else None


def draw_needles(records: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Draw depth by length for each method, from records that have a depth, to a file of any format."""
    plt = pyplot()

    figure = _needle_maps(plt, records)
    save_figure(figure, path, 160)
    plt.close(figure)


def _needle_maps(plt, records: Sequence[Mapping[str, Any]]):
    methods = list(dict.fromkeys(record["method"] for record in records))
    lengths = sorted({record["length"] for record in records})
    depths = sorted({record["depth"] for record in records})
    size = (1.2 + 2.6 * len(methods), 3.2)
    figure, axes = plt.subplots(1, len(methods), figsize=size, layout="constrained", squeeze=False, sharey=True)
    shown = None
    for axis, method in zip(axes[0], methods, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for i, depth in enumerate(depths):
            for j, length in enumerate(lengths):
                cell = (method, length, depth)
                found = [r["score"] for r in records if (r["method"], r["length"], r["depth"]) == cell]
                grid[i, j] = np.mean(found) if found else np.nan
        shown = axis.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axis.set(title=method, xlabel="tokens")
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes[0, 0].set_ylabel("depth of the needle")
    figure.colorbar(shown, ax=axes[0], label="found (%)")
    return figure
