"""Errors of attention outputs on windows of a text, as records."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus, token_windows
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.evals.asking.methods import bases_of, calibration_settings, check_methods, conditions_of
from lowrank_kv_jax.evals.outputs.errors import layout_of_text, output_errors
from lowrank_kv_jax.evals.results.records import append_record, make_record
from lowrank_kv_jax.evals.results.resume import finished, key_of
from lowrank_kv_jax.evals.results.sizes import size_fields, size_of
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

COMMAND = "eval outputs"


def check_queries(length: int, queries: int) -> None:
    """Raise ValueError unless something stands before the queries in a window of `length` tokens."""
    if not 1 <= queries < length:
        raise ValueError(f"queries={queries}: must lie in 1..{length - 1} for windows of {length} tokens")


def evaluate_outputs(
    model: Any, methods: Mapping[str, Part], text: Corpus | None = None, length: int = 2048, queries: int = 128,
    windows: int = 2, seed: int = 0, *, json: str | os.PathLike | None = None, dtype: str | None = None,
    calibrate: Corpus | None = None, progress: bool = False,
) -> list[dict[str, Any]]:
    """One record for each window and method.

    Args:
        text: by default the second half of Python's language reference.
        length, windows, seed: see `token_windows`.
        queries: the last so many tokens of a window attend to the others.
        json: records are appended to it; those that it holds are not computed again.
        dtype: of the caches.
        calibrate: what bases are fitted to, by default the first half of Python's language reference.

    Returns:
        Records with `errors`, one for each layer (see `output_errors`), and `score`, the root of their mean square.

    Raises:
        ValueError: as `token_windows` and `output_errors`, errors that are not finite, or a file that holds results of
            another run.
    """
    check_methods(model, methods, COMMAND)
    if length > model.config.context:
        raise ValueError(f"length={length}: the model's context is {model.config.context} tokens")
    check_queries(length, queries)
    text, corpus = text or load_corpus("pydoc:second"), calibrate or load_corpus("pydoc:first")
    dtype = dtype or default_cache_dtype()
    cut = token_windows(model.tokenizer, text.texts, length, windows, seed)
    settings = {"queries": queries, "weights_dtype": weights_dtype(model), "cache_dtype": dtype,
                "text": {"name": text.name, "sha256": text.sha256}, **calibration_settings(corpus, methods)}
    conditions = {spec: conditions_of(settings, method) for spec, method in methods.items()}
    digests = [hashlib.sha256(np.ascontiguousarray(window).tobytes()).hexdigest() for window in cut]

    def key(spec: str, index: int) -> tuple:
        return COMMAND, model.fingerprint, spec, "outputs", length, index, None, seed

    wanted = {key(spec, i): {**conditions[spec], "window_sha256": own}
              for i, own in enumerate(digests) for spec in methods}
    known = {} if json is None else finished(json, wanted)
    missing = {spec: m for spec, m in methods.items() if any(key(spec, i) not in known for i in range(len(cut)))}
    bases = bases_of(model, missing, corpus, dtype=dtype, progress=progress)
    layouts = {spec: layout_of_text(model, length, queries, dtype, method) for spec, method in missing.items()}
    sizes = {spec: size_of(abstract_cache(method, layouts[spec], bases.get(spec)), bases.get(spec))
             for spec, method in missing.items()}
    with ProgressBar(COMMAND, len(cut) * len(missing), progress) as bar:
        for index, window in enumerate(cut):
            left = {spec: method for spec, method in missing.items() if key(spec, index) not in known}
            found = output_errors(model, left, window, queries, bases=bases, dtype=dtype)
            for spec, errors in found.items():
                if not np.isfinite(errors).all():
                    layer = np.isfinite(errors).argmin()
                    raise ValueError(f"{spec}: the errors of layer {layer} are not finite in window {index}: its "
                                     "outputs, or the exact ones, are NaN or overflow")
                record = make_record(
                    COMMAND, model=model.name, fingerprint=model.fingerprint, method=spec, task="outputs", length=length,
                    index=index, samples=1, seed=seed, score=float(np.sqrt(np.mean(np.square(errors)))),
                    errors=[float(error) for error in errors], window_sha256=digests[index],
                    **size_fields(sizes[spec]), **conditions[spec],
                )
                assert key_of(record) == key(spec, index)
                known[key(spec, index)] = record
                bar.advance()
                if json is not None:
                    append_record(json, record)
    return [known[key(spec, index)] for index in range(len(cut)) for spec in methods]
