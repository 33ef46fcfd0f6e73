"""Bases of several methods from one run of the model over a corpus."""

from collections.abc import Mapping
from typing import Any

from lowrank_kv_jax.calibration.calibrate import fit_bases, moments_for
from lowrank_kv_jax.calibration.corpus import Corpus, token_windows
from lowrank_kv_jax.method import Part

LENGTH, WINDOWS = 2048, 4
_LAST: dict[Any, Any] = {}
"""The moments that were collected last, by what decides them."""


def bases_of(
    model: Any, methods: Mapping[str, Part], corpus: Corpus, *, length: int = LENGTH,
    windows: int = WINDOWS,
    seed: int = 0, dtype: Any = "bfloat16", progress: bool = False,
) -> dict[str, Any]:
    """The bases of those methods that are calibrated; empty, without running the model, where none is.

    Args:
        length, windows, seed: see `token_windows`; no window is longer than the model's context.
    """
    calibrated = {spec: method for spec, method in methods.items() if method.calibrated}
    if not calibrated:
        return {}
    tokens = token_windows(model.tokenizer, corpus.texts, min(length, model.config.context), windows, seed)
    key = model.fingerprint, corpus.sha256, tokens.shape, seed
    moments = _LAST.get(key)  # an evaluation asks again and again, for the same text
    if moments is None or not all(method.reads <= moments.held for method in calibrated.values()):
        moments = moments_for(model, list(calibrated.values()), tokens, progress)
        _LAST.clear()
        _LAST[key] = moments
    return {spec: fit_bases(model, method, moments, dtype) for spec, method in calibrated.items()}


def calibration_settings(corpus: Corpus, methods: Mapping[str, Part]) -> dict[str, Any]:
    """What records keep of the calibration; null where no method needs one."""
    calibrated = any(method.calibrated for method in methods.values())
    return {"calibration": {"corpus": corpus.name, "sha256": corpus.sha256} if calibrated else None}


def conditions_of(settings: Mapping[str, Any], method: Part | None) -> dict[str, Any]:
    """A run's settings as the records of one method keep them: without a calibration that it does not read.

    So a method's records stay the same whatever other methods shared its run.
    """
    if method is not None and method.calibrated or "calibration" not in settings:
        return dict(settings)
    return {**settings, "calibration": None}
