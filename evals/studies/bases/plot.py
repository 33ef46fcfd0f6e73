"""A picture of the diagnostics: how fast the energy decays, and what bases lose in each layer."""

from typing import Any

import numpy as np

from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure

TAPS = {"k": "keys after RoPE", "k_pre": "keys before RoPE", "v": "values"}


def plot_diagnostics(path: str, spectra: list[dict[str, Any]], adaptation: list[dict[str, Any]]) -> None:
    """Write a PNG: one panel of spectra, one of RER by layer for keys and one for values.

    Args:
        path: where to; its ending decides the format.
        spectra: rows of `spectra_table`.
        adaptation: rows of `adaptation_table`, drawn for the last text among them (the shifted one).
    """
    figure = new_figure(figsize=(13, 4), layout="constrained")
    left, *sides = figure.subplots(1, 3)
    for row in spectra:
        share = np.array(row["spectrum"])
        share = share.reshape(-1, share.shape[-1])
        component = np.arange(1, share.shape[1] + 1)
        (line,) = left.plot(component, share.mean(0), label=TAPS[row["tap"]])
        low, high = np.quantile(share, (0.1, 0.9), axis=0)
        left.fill_between(component, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    left.set(yscale="log", xlabel="component", ylabel="share of energy", title="Spectra (10-90% of heads)")
    left.legend()
    text = adaptation[-1]["text"]
    for axes, side in zip(sides, ("k", "v"), strict=True):
        rows = [row for row in adaptation if row["side"] == side and row["text"] == text]
        for row in rows:
            axes.plot(np.mean(row["rer_per_layer"], axis=1), marker=".", label=row["method"])
        axes.plot(np.mean(rows[0]["oracle_rer_per_layer"], axis=1), "k:", label="oracle")
        name = {"k": "Keys", "v": "Values"}[side]
        axes.set(xlabel="layer", ylabel="RER", title=f"{name}, rank {rows[0]['rank']}, on {text}")
        axes.set_ylim(bottom=0)
    handles, labels = sides[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), fontsize="small")
    save_figure(figure, path, 150)
