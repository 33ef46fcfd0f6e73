"""Falsifier 4 of Online Subspace Projection: whether sketches and residuals foretell errors, chunk by chunk."""

from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.evals.studies.subspaces.chunk_errors import ChunkErrors, code_prompt, errors_by_chunk, sketching
from lowrank_kv_jax.generation.forward import make_layout

PAIRS = (
    ("key_sketch", "key_residual", "sketch of keys and ||K_j (I - P_j)||"),
    ("value_sketch", "value_residual", "sketch of values and ||V_j (I - P_j)||"),
    ("key_sketch", "logit", "sketch of keys and logit error"),
    ("value_sketch", "output", "sketch of values and output error"),
    ("key_residual", "logit", "residual of keys and logit error"),
    ("value_residual", "output", "residual of values and output error"),
    ("key_residual", "output", "residual of keys and output error"),
    ("logit_bound", "logit", "bound and logit error"),
    ("output_bound", "output", "bound and output error"),
)
CLAIMED = range(2, 6)
"""Pairs that the paper claims: epsilon and residuals predict logit and output errors."""
BOUNDS = ("logit_bound", "output_bound")


def prompt_errors(model: Any, method: Any, tokens: np.ndarray, bases: Any, dtype: Any, queries: int) -> ChunkErrors:
    """NumPy arrays `[L, ...]` of `errors_by_chunk` of prompts int32 `[B, S]`.

    Raises:
        ValueError: as `sketching`; a model whose logits are capped, for which there are no bounds.
    """
    if model.config.attention.logit_cap is not None:
        raise ValueError(f"logit_cap={model.config.attention.logit_cap}: the bounds are of logits that are not capped")
    method = sketching(method)
    layout = make_layout(model.config, *tokens.shape, tokens.shape[1], dtype=dtype)
    layers = []
    for layer, taps in enumerate(iterate_taps(model.config, model.params, tokens)):
        own = layout.of_layer(layer)
        coded = code_prompt(method, own, bases[layer], taps)
        layers.append([np.asarray(x) for x in errors_by_chunk(own, coded, taps, method.sinks, queries)])
    return ChunkErrors(*(np.stack(x) for x in zip(*layers, strict=True)))


def correlations(found: ChunkErrors) -> list[dict[str, Any]]:
    """Of each of `PAIRS` the rank correlation over all chunks of all heads and layers, and that of the chunks of one head
    of one layer, mean over heads, 0 where there are fewer than three chunks; how often a bound was violated, and its
    median slack."""
    used = np.broadcast_to(found.used[:, :, None], found.logit.shape)
    rows = []
    for one, other, what in PAIRS:
        x, y = (np.asarray(getattr(found, name), np.float64) for name in (one, other))
        heads = zip(*(a.reshape(-1, a.shape[-1]) for a in (x, y, used)), strict=True)
        within = [rank_correlation(a[own], b[own]) for a, b, own in heads if own.sum() > 2]
        row = {"what": what, "spearman": rank_correlation(x[used], y[used]),
               "within_heads": float(np.mean(within)) if within else 0.0, "violated": None, "median_slack": None}
        if one in BOUNDS:
            row["violated"] = float(np.mean(y[used] > x[used] * (1 + 1e-3) + 1e-4))
            row["median_slack"] = float(np.median(x[used] / np.maximum(y[used], 1e-12)))
        rows.append(row)
    return rows


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's, 0 where one of the two is constant; equal values share the mean of their ranks."""
    from scipy.stats import rankdata

    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])
