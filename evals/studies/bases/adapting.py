"""How a method's bases follow a shift of the text: what they lose of a prompt, or of how it goes on."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.calibration.calibrate import fit_bases, iterate_taps
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.evals.studies.bases.logit_error import logit_error
from lowrank_kv_jax.evals.studies.bases.metrics import (
    principal_basis,
    reconstruction_cosine,
    residual_energy_ratio,
    second_moment,
    subspace_overlap,
)
from lowrank_kv_jax.generation.forward import compress_group, make_layout
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.progress import ProgressBar

ADAPTATION_METHODS = ("static-pca-h:rank=0.5", "ojakv:rank=0.5")


def adaptation_table(
    model: Any, calibration: Moments, tests: dict[str, np.ndarray],
    methods: Sequence[str | Part] = ADAPTATION_METHODS, progress: bool = False, learned: float = 1.0,
) -> list[dict[str, Any]]:
    """Table 1 of OjaKV for any low-rank methods: what the bases they read a prompt with lose of it.

    Each method is calibrated on the same moments and then prefills the text, which is where adaptive methods
    move their bases. The oracle is the text's own principal subspace of the same rank (keys alone, without
    queries). All tokens count, those too that the method keeps exact. Everything is float32. With `learned` below 1
    bases learn from that share of the text, and the rest is measured, which is the paper's own protocol.

    Args:
        model: a `LoadedModel`.
        calibration: moments of the calibration corpus.
        tests: name of the text -> int32 tokens `[n, S]`.
        methods: specs or methods that keep coefficients in one basis a layer.
        progress: show a progress bar.
        learned: share of the text that bases learn from.

    Returns:
        Rows of "method", "text", "side" ("k" or "v"), "rank", "width", the means "rer", "oracle_rer",
        "overlap", "cosine" and, of keys, "logit_error" over layers, heads and windows, and "rer_per_layer", ... as
        `[L][J]` lists.

    Raises:
        ValueError: as `fitted_methods`; a share beyond (0, 1].
    """
    if not 0 < learned <= 1:
        raise ValueError(f"learned={learned!r}: must lie in (0, 1]")
    fitted = fitted_methods(model, calibration, methods)
    steps = sum(len(tokens) for tokens in tests.values()) * model.config.num_layers
    with ProgressBar("adapting", steps, progress) as bar:
        rows = (_adaptation_rows(model, text, tokens, fitted, learned, bar) for text, tokens in tests.items())
        return [row for text_rows in rows for row in text_rows]


def fitted_methods(
    model: Any, calibration: Moments, methods: Sequence[str | Part], one_basis: bool = True
) -> list[tuple[Any, Any]]:
    """Low-rank methods, each with its bases, float32, or None where it takes none.

    Args:
        one_basis: whether those are refused that keep several bases a layer, as chunks of tokens have.

    Raises:
        ValueError: a method that does not code tokens in a basis, or that the model does not suit.
    """
    fitted = []
    for method in methods:
        method = parse_method(method) if isinstance(method, str) else method
        if not method.rebuilds or (one_basis and not method.per_token):
            raise ValueError(f"method {method.name!r} has no {'one ' if one_basis else ''}basis of a layer to diagnose; "
                             "give a low-rank one")
        method.validate(model.config.attention)
        bases = fit_bases(model, method, calibration, jnp.float32) if method.calibrated else None
        fitted.append((method, bases))
    return fitted


def _adaptation_rows(
    model, text: str, tokens: np.ndarray, fitted, learned: float, bar: ProgressBar
) -> list[dict[str, Any]]:
    found: dict[tuple[int, str], list[dict[str, np.ndarray]]] = {}
    size = max(1, round(learned * tokens.shape[1]))
    measured = slice(0 if learned == 1 else min(size, tokens.shape[1] - 1), None)
    layout, lengths = make_layout(model.config, 1, size, size, dtype=jnp.float32), jnp.full((1,), size, jnp.int32)
    for window in tokens:
        for layer, taps in enumerate(iterate_taps(model.config, model.params, window[None])):
            for index, (method, bases) in enumerate(fitted):
                own = None if bases is None else bases[layer]
                state = compress_group(method, layout.of_layer(layer), own, (taps.part(slice(0, size)),), lengths)
                for side, losses in _losses(model, method, layer, own, state.store, taps.part(measured)):
                    found.setdefault((index, side), []).append(losses)
            bar.advance()
    rows = []
    for (index, side), losses in found.items():
        rows.append(_adaptation_row(model, fitted[index][0], text, side, losses))
    return rows


def _losses(
    model, method: Any, layer: int, own: Any, store: Any, taps: Taps
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """By side, metrics `[J]` of one layer and window, and of keys the error of logits `[K]`."""
    spec, places = model.config.attention.of_layer(layer), np.arange(taps.v.shape[1])
    sides = taps.k_pre if method.rope == "pre" else taps.k, taps.v
    frame = method.frame(model.config.attention, own, store)
    for side, tap, code in zip(("k", "v"), sides, frame.code(*sides), strict=True):
        x = np.asarray(tap[0])
        rebuilt = np.asarray(frame.rebuild(side, code, model.config.kv_heads)[0])
        basis = getattr(frame, side)
        basis = np.asarray(basis[0] if basis.ndim == 4 else basis, np.float64)
        error = x - rebuilt.swapaxes(0, 1)
        by_basis, lost = (y.reshape(len(x), len(basis), -1).swapaxes(0, 1) for y in (x, error))
        moment = second_moment(by_basis)
        oracle = principal_basis(moment, basis.shape[-1])
        metrics = {
            "rer": np.sum(lost**2, axis=(1, 2)) / np.sum(by_basis**2, axis=(1, 2)),
            "oracle_rer": residual_energy_ratio(moment, oracle),
            "overlap": subspace_overlap(basis, oracle),
            "cosine": reconstruction_cosine(x.swapaxes(0, 1), rebuilt),
            "shape": np.array(basis.shape[1:]),
        }
        if side == "k" and taps.q.shape[-1]:
            metrics["logit_error"] = logit_error(spec, method.rope, taps.q[0], error, places, places)
        yield side, metrics


def _adaptation_row(model, method: Any, text: str, side: str, losses) -> dict[str, Any]:
    width, rank = (int(n) for n in losses[0]["shape"])
    row = {"method": spell_method(method), "text": text, "side": side, "rank": rank, "width": width, "logit_error": None}
    for metric in ("rer", "oracle_rer", "overlap", "cosine", *(["logit_error"] if "logit_error" in losses[0] else [])):
        values = np.stack([entry[metric] for entry in losses])
        values = values.reshape(-1, model.config.num_layers, values.shape[-1]).mean(0)
        row |= {metric: float(values.mean()), f"{metric}_per_layer": values.tolist()}
    return row
