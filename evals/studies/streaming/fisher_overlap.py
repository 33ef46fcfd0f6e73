"""Fisher overlap of two corpora by frequency band (StreamingKV, section 3.1, equations 10 and 11, figure 3)."""

from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.fisher import PROJECTIONS
from lowrank_kv_jax.estimators.moments import Fisher
from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure


def fisher_overlap(model: Any, first: Fisher, second: Fisher, bands: int = 8) -> dict[str, np.ndarray]:
    """Cosine of V_i^T F_1 V_i and V_i^T F_2 V_i `[L, bands]` for keys ("k") and values ("v").

    F `[W, W]` is the information over the outputs of a projection, V_i its right singular vectors of a band: bands are
    equal cuts of the singular vectors by index, the largest singular values first.

    Args:
        model: a `LoadedModel`, whose W_k and W_v give the bands.
        first, second: of the two corpora.
        bands: as equal as the width allows.

    Raises:
        ValueError: more bands than singular vectors.
    """
    width = first.k.shape[-1]
    if not 1 <= bands <= width:
        raise ValueError(f"bands={bands}: must lie in 1..{width}, the channels of a projection")
    cuts = np.array_split(np.arange(width), bands)
    out = {}
    for side, name in PROJECTIONS.items():
        rows = []
        for layer, weights in enumerate(model.params["layers"]):
            kernel = np.asarray(weights["attention"][name]["kernel"], np.float64)
            right = np.linalg.svd(kernel)[2].T
            pair = [getattr(fisher, side)[layer] for fisher in (first, second)]
            rows.append([_cosine(*(right[:, cut].T @ f @ right[:, cut] for f in pair)) for cut in cuts])
        out[side] = np.array(rows)
    return out


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.sum(a * b)) / norms if norms > 0 else 0.0


def plot_overlap(path: str, overlap: dict[str, np.ndarray], title: str) -> None:
    """Write a PNG: the overlap by band, keys and values, every layer a line and their mean."""
    figure = new_figure(figsize=(9, 3.6), layout="constrained")
    for axes, (side, rows) in zip(figure.subplots(1, 2, sharey=True), overlap.items(), strict=True):
        band = np.arange(1, rows.shape[1] + 1)
        for row in rows:
            axes.plot(band, row, color="tab:blue", alpha=0.15, linewidth=0.8)
        axes.plot(band, rows.mean(0), color="black", marker="o", label="mean over layers")
        axes.set(xlabel="band of singular vectors", title={"k": "W_k", "v": "W_v"}[side], ylim=(0, 1.02))
        axes.legend(loc="lower left")
    figure.axes[0].set_ylabel("Fisher overlap")
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, path, 130)
