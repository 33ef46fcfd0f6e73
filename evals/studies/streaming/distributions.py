"""How well single tokens are rebuilt, by text (StreamingKV, figures 1, 7 and 8)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure
from lowrank_kv_jax.evals.studies.streaming.learned_layers import of_sides
from lowrank_kv_jax.evals.studies.streaming.reconstruction import cosines, rebuilt_tokens
from lowrank_kv_jax.method import Part

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
DEPTH = 25 / 32
"""Of the layer in figure 1: the 25th of Llama-2-7B's 32."""


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Over the tokens of a text, in one layer; `layer` is -1 for those of all layers together.

    Attributes:
        cosine: `QUANTILES` of the cosine between a token's original and rebuilt channels, all heads side by side.
        mse: of its mean squared error over these channels.
    """

    spec: str
    text: str
    layer: int
    side: str
    cosine: tuple[float, ...]
    mse: tuple[float, ...]


def distributions(
    model: Any, methods: Mapping[str, Part], bases: Mapping[str, Any], texts: Mapping[str, np.ndarray],
    progress: bool = False,
) -> list[Distribution]:
    """Of every layer, then of all layers together.

    Args, raises: as of `of_sides`; rows of a text are pooled.
    """
    found: dict[tuple[str, str, int, str], list[np.ndarray]] = {}
    for (spec, text, layer, side), parts in of_sides(model, methods, bases, texts, _of_tokens, progress).items():
        found[spec, text, layer, side] = parts
        found.setdefault((spec, text, -1, side), []).extend(parts)
    cuts = {key: np.quantile(np.concatenate(parts, axis=1), QUANTILES, axis=1).T for key, parts in found.items()}
    rows = [Distribution(*key, *(tuple(map(float, own)) for own in cut)) for key, cut in cuts.items()]
    return sorted(rows, key=lambda row: row.layer < 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _of_tokens(method, spec, bases, store, tokens) -> jax.Array:
    """Cosine and mean squared error of keys and values `[2, 2, S]`."""
    return jnp.stack([jnp.stack([cosines(x, close), jnp.mean((x - close) ** 2, axis=-1)])
                      for x, close in rebuilt_tokens(method, spec, bases, store, tokens)])


def shown_layer(layers: int) -> int:
    """The layer of figure 1 in a model of so many, counted from 0."""
    return min(round(DEPTH * layers), layers) - 1


def plot_distributions(path: str, rows: Sequence[Distribution], title: str, side: str = "v") -> None:
    """Write a PNG: cosines and errors by text in the layer of figure 1, and cosines by layer (figure 7)."""
    rows = [row for row in rows if row.side == side and row.layer >= 0]
    layers, texts = 1 + max(row.layer for row in rows), list(dict.fromkeys(row.text for row in rows))
    specs, layer = list(dict.fromkeys(row.spec for row in rows)), shown_layer(layers)
    figure = new_figure(figsize=(15, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, field, name in ((left, "cosine", "cosine"), (middle, "mse", "mean squared error")):
        for i, spec in enumerate(specs):
            own = [row for row in rows if row.layer == layer and row.spec == spec]
            at = [texts.index(row.text) + (i - (len(specs) - 1) / 2) * 0.8 / len(specs) for row in own]
            boxes = [dict(zip(("whislo", "q1", "med", "q3", "whishi"), getattr(row, field), strict=True)) for row in own]
            axes.bxp(boxes, positions=at, widths=0.6 / len(specs), showfliers=False,
                     boxprops={"color": f"C{i}"}, medianprops={"color": f"C{i}"})
        axes.set(xticks=range(len(texts)), xticklabels=texts, ylabel=name, title=f"layer {layer + 1} of {layers}")
    for i, spec in enumerate(specs):
        for text, style in zip(texts, ("-", "--", ":", "-.") * len(texts), strict=False):
            own = sorted((row for row in rows if (row.spec, row.text) == (spec, text)), key=lambda row: row.layer)
            right.plot([row.layer + 1 for row in own], [row.cosine[2] for row in own], style, color=f"C{i}",
                       label=f"{spec}, {text}")
    right.set(xlabel="layer", ylabel="median cosine")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, path, 130)
