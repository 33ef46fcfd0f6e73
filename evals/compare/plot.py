"""Quality against bytes, as a figure for a paper."""

import os
from collections.abc import Sequence

from lowrank_kv_jax.evals.compare.run import Result
from lowrank_kv_jax.evals.results.figure_file import pyplot, save_figure

MARKERS = "osD^vP*Xh<>p8d"


def plot_results(results: Sequence[Result], path: str | os.PathLike, title: str) -> None:
    """Draw needle retrieval at each length, and perplexity, against bytes a token."""
    plt = pyplot()

    lengths = sorted(results[0].needle)
    panels = len(lengths) + 1
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, panels, figsize=(3.3 * panels, 3.6), layout="constrained")
        for axis, length in zip(axes, lengths, strict=False):
            points = [(_kib(result, length), result.needle[length]) for result in results]
            _scatter(axis, results, points)
            axis.set(title=f"Needle retrieval, {length} tokens", ylabel="retrieved (%)", ylim=(-5, 105))
        points = [(_kib(result, lengths[0]), result.perplexity.ppl) for result in results]
        _scatter(axes[-1], results, points)
        axes[-1].set(title=f"Text after {lengths[0]} tokens", ylabel="perplexity (lower is better)")
        if max(y for _, y in points) > 5 * min(y for _, y in points):
            axes[-1].set_yscale("log")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
        figure.suptitle(title, fontsize=10)
        save_figure(figure, path, 200)
        plt.close(figure)


def _kib(result: Result, length: int) -> float:
    return result.size[length].per_token / 1024


def _scatter(axis, results: Sequence[Result], points: Sequence[tuple[float, float]]) -> None:
    for number, (result, (x, y)) in enumerate(zip(results, points, strict=True)):
        color = "black" if result.spec == "full" else f"C{number % 10}"
        marker = MARKERS[number % len(MARKERS)]
        axis.plot(x, y, marker, color=color, markersize=8, alpha=0.85, label=result.spec, clip_on=False)
    axis.set_xlabel("cache, KiB per token")
    axis.set_xlim(0, 1.05 * max(x for x, _ in points))
    axis.grid(alpha=0.3)
