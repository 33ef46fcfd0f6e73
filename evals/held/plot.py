"""A picture of what each layer holds of a prompt."""

from typing import Any

import numpy as np

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.evals.held.prompt import HeldPrompt
from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure
from lowrank_kv_jax.method.held import Held

COLOURS = {Held.GONE: "#f1f1f1", Held.CODED: "#f0a33c", Held.EXACT: "#1f4e8c"}
SUMMARISED = "#cfe6d8"
PIXELS = 1400
"""Of the token axis; longer prompts are drawn with neighbours averaged."""


def plot_held(path: str, title: str, found: HeldPrompt, *, by_head: bool = False) -> None:
    """Write a figure: layers (or their kv heads) against token positions, and the attention that falls on what is held.

    Args:
        path: where to; its ending decides the format.
        by_head: a line for each kv head; otherwise the colours of a layer's heads are averaged.
    """
    check_extra("matplotlib", "a figure")
    from matplotlib.colors import to_rgb

    layers, heads, tokens = found.held.shape
    colours = COLOURS | ({Held.GONE: SUMMARISED} if found.summarised else {})
    table = np.array([to_rgb(colours[how]) for how in sorted(Held)])
    lines = table[found.held].reshape(layers * heads, tokens, 3)
    lines = lines if by_head else lines.reshape(layers, heads, tokens, 3).mean(1)
    attention = found.attention.reshape(-1, 1) if by_head else found.attention.mean(1, keepdims=True)

    figure = new_figure(figsize=(12, min(max(2.6, 1.6 + 0.14 * len(lines)), 9)), layout="constrained")
    some = bool(np.isfinite(attention).any())
    axes = figure.subplots(1, 2 if some else 1, squeeze=False, sharey=True, width_ratios=[6, 1][: 1 + some])[0]
    smooth = "nearest" if tokens <= PIXELS else "antialiased"
    axes[0].imshow(lines, aspect="auto", interpolation=smooth, extent=(0, tokens, layers, 0))
    axes[0].set(xlabel="position of the token", ylabel="layer, its kv heads" if by_head else "layer")
    if by_head:
        axes[0].hlines(np.arange(1, layers), 0, tokens, colors="white", linewidth=1)
    step = -(-layers // 16)
    axes[0].set_yticks(np.arange(0, layers, step) + 0.5, range(0, layers, step))
    if some:
        height = layers / len(attention)
        at = (np.arange(len(attention)) + 0.5) * height
        axes[1].barh(at, 100 * np.nan_to_num(attention[:, 0]), 0.8 * height, color="#777777")
        axes[1].set(xlim=(0, 100), xlabel="% of attention\non what is held")
        axes[1].spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    _legend(figure, colours, found, by_head)
    save_figure(figure, path, 150)


def _legend(figure: Any, colours: dict[Held, str], found: HeldPrompt, by_head: bool) -> None:
    """Of what is there; shades are heads that differ."""
    from matplotlib.patches import Patch

    names = {Held.EXACT: "exact", Held.CODED: "coded",
             Held.GONE: "in the summary alone" if found.summarised else "dropped"}
    entries = [Patch(facecolor=colours[how], edgecolor="#999999", linewidth=0.5, label=name)
               for how, name in names.items() if (found.held == how).any()]
    shades = not by_head and (found.held != found.held[:, :1]).any()
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False, fontsize="small",
                  title="shades: held by some of a layer's kv heads" if shades else None, title_fontsize="small")
