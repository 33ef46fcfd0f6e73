"""Figure 2 of xKV for any model: token-wise cosine, CKA, and the rank for a share of the energy."""

import os

from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure
from lowrank_kv_jax.evals.studies.cross_layer.analysis import Analysis


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
