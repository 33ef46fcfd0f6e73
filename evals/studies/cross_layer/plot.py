"""Figure 2 of xKV for any model: token-wise cosine, CKA, and the rank for a share of the energy; and adjacent layers."""

import os
from collections.abc import Sequence

from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure
from lowrank_kv_jax.evals.studies.cross_layer.analysis import Analysis
from lowrank_kv_jax.evals.studies.cross_layer.latents import Pairs


def plot_analysis(path: str | os.PathLike, analysis: Analysis, title: str = "") -> None:
    """Write a picture; the ending of `path` decides the format."""
    figure = new_figure(figsize=(17, 6.5), layout="constrained")
    axes = figure.subplots(len(analysis.cka), 3, squeeze=False)
    for row, side in zip(axes, analysis.cka, strict=True):
        for axis, name, matrix in (
            (row[0], "token-wise cosine", analysis.cosine),
            (row[1], "CKA", analysis.cka),
        ):
            low = min(0.0, float(matrix[side].min()))
            image = axis.imshow(matrix[side], vmin=low, vmax=1, cmap="coolwarm", origin="lower")
            axis.set(xlabel="layer", ylabel="layer", title=f"{side}: {name}")
            figure.colorbar(image, ax=axis, shrink=0.8)
        sizes = sorted(analysis.ranks[side])
        row[2].plot(sizes, [100 * analysis.rank_ratio(side, size) for size in sizes], marker="o")
        row[2].set(
            xlabel="layers of a group",
            ylabel="% of the width",
            ylim=(0, None),
            title=f"{side}: rank for {analysis.energy:.0%} of the energy",
        )
    figure.suptitle(title)
    save_figure(figure, path, 130)


def plot_pairs(path: str | os.PathLike, rows: Sequence[Pairs], title: str = "") -> None:
    """Write a picture of adjacent layers: cosine, cosine after the best turn, and what a merge loses."""
    figure = new_figure(figsize=(15, 4.2), layout="constrained")
    panels = {"cosine": "token-wise cosine", "turned": "after the best turn", "lost": "energy that a SLERP merge loses"}
    for axes, (field, name) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for row in rows:
            values = getattr(row, field)
            axes.plot(range(1, len(values) + 1), values, marker=".", label=f"{row.what} ({row.width})")
        axes.set(xlabel="first layer of the pair", title=name, ylim=(min(0.0, axes.get_ylim()[0]), None))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(title)
    save_figure(figure, path, 130)
