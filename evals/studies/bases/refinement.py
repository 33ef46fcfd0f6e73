"""What refining bases of transform coding by gradient is worth, on texts that the refinement has not seen."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.corpus import Corpus, token_windows
from lowrank_kv_jax.calibration.refine import PARTS, check_refinable, refine
from lowrank_kv_jax.evals.asking.methods import LENGTH, WINDOWS, bases_of
from lowrank_kv_jax.evals.outputs.errors import output_errors
from lowrank_kv_jax.evals.perplexity.score import score_many
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

LEARNT: dict[str, tuple[str, ...]] = {"none": (), **{part: (part,) for part in PARTS}, "both": tuple(PARTS)}
"""What is refined, by name."""
QUERIES = 128
"""Of a window, whose attention outputs are compared; a quarter of a short one."""


def refinement_table(
    model: Any, corpus: Corpus, tests: Mapping[str, np.ndarray], methods: Sequence[str | Part], steps: int, *,
    length: int = LENGTH, windows: int = WINDOWS, seed: int = 0, progress: bool = False,
) -> list[dict[str, Any]]:
    """Calibrated bases, and the same after `steps` of `calibration.refine` of their steps, directions or both.

    Args:
        model: a `LoadedModel`.
        corpus: what bases are fitted to and refined on.
        tests: name of the text -> int32 tokens `[n, S]`; the second half of a window is scored behind the first.
        methods: specs or methods whose bases can be refined.
        steps: of Adam, for each group of layers.
        length, windows, seed: of the calibration, see `token_windows`; the seed is that of queries and their order, too.

    Returns:
        Rows of "method", "learnt" (of `LEARNT`), "text", the means over windows "output_error" (root mean square over
        layers, see `output_errors`), "perplexity" and "divergence" (nats a token, from the full cache's predictions),
        and "full_perplexity". Caches are of the default dtype.

    Raises:
        ValueError: as `check_refinable` and `refine`.
    """
    parsed = [parse_method(one) if isinstance(one, str) else one for one in methods]
    for method in parsed:
        check_refinable(method)
    size = min(length, model.config.context)
    tokens = token_windows(model.tokenizer, corpus.texts, size, windows, seed, corpus=corpus.name)
    calibrated = {spell_method(method): method for method in parsed}
    fitted = bases_of(model, calibrated, corpus, length=length, windows=windows, seed=seed, progress=progress)
    rows = []
    for method in parsed:
        own = fitted[spell_method(method)]
        bases = {
            name: refine(model, method, own, tokens, steps, learn, seed=seed, progress=progress) if learn else own
            for name, learn in LEARNT.items()
        }
        with ProgressBar(f"measuring {spell_method(method)}", sum(map(len, tests.values())), progress) as bar:
            for text, cut in tests.items():
                found = []
                for window in cut:
                    found.append(_measured(model, method, bases, window))
                    bar.advance()
                rows += [
                    {"method": spell_method(method), "text": text, "learnt": name, **_means([one[name] for one in found])}
                    for name in bases
                ]
    return rows


def _measured(model: Any, method: Part, bases: Mapping[str, Any], window: np.ndarray) -> dict[str, dict[str, float]]:
    """Of one window, by what was learnt: output error, mean negative log-likelihoods and divergence."""
    dtype, methods = default_cache_dtype(), dict.fromkeys(bases, method)
    errors = output_errors(model, methods, window, min(QUERIES, len(window) // 4), bases=bases, dtype=dtype)
    with_full = {"full": parse_method("full"), **methods}
    scored = score_many(model, with_full, window[None], len(window) // 2, bases=bases, dtype=dtype)
    scores = {one.spec: one.perplexity for one in scored}
    return {
        name: {
            "output_error": float(np.sqrt(np.mean(np.square(errors[name])))),
            "nll": float(np.mean(scores[name].nll)),
            "divergence": float(np.mean(scores[name].divergence)),  # type: ignore[arg-type]
            "full_nll": float(np.mean(scores["full"].nll)),
        }
        for name in bases
    }


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    mean = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
    return {
        "output_error": mean["output_error"], "perplexity": float(np.exp(mean["nll"])), "divergence": mean["divergence"],
        "full_perplexity": float(np.exp(mean["full_nll"])),
    }
