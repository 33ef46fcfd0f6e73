"""Retention through compressed caches, as records."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.evals.asking.batches import check_lengths
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate_calibrated
from lowrank_kv_jax.evals.retention.contexts import MOST_NEEDLES, make_context
from lowrank_kv_jax.evals.retention.questions import MODES, cut_text, questions_of
from lowrank_kv_jax.evals.ruler.haystack import split_sentences
from lowrank_kv_jax.method import Part

COMMAND = "eval retention"


def evaluate_retention(
    model: Any, methods: Mapping[str, Part], lengths: Sequence[int] = (1024,), modes: Sequence[str] = MODES,
    turns: int = 5, after: Sequence[int] = (0, 512, 2048), samples: int = 4, seed: int = 0, *,
    haystack: Corpus | None = None, between: Corpus | None = None, json: str | os.PathLike | None = None, rows: int = 4,
    dtype: str | None = None, calibrate: Corpus | None = None, progress: bool = False, mesh: Any = None,
    prefill_chunk: int | None = None,
) -> list[dict[str, Any]]:
    """Score methods on what they still know of a context.

    Args:
        model: a `LoadedModel` with a tokenizer.
        methods: by spec.
        lengths: tokens of a context, at most.
        modes: of `MODES`, see `questions_of`.
        turns: questions on a context.
        after: tokens of other text that go through the cache before a question of the mode distance.
        samples: contexts of each length.
        haystack: what needles are hidden in, sentence by sentence; by default RULER's noise.
        between: the other text; by default the second half of Python's language reference.

    The other arguments are those of `evaluate_ruler`.

    Returns:
        One record for each question and method, with `answer_nll`, nats a token of the true answer.

    Raises:
        ValueError: an unknown mode, numbers out of range, or as `make_context` and `evaluate`.
    """
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise ValueError(f"modes={short(tuple(modes))}: allowed are {', '.join(MODES)}")
    for name, value, least in (("samples", samples, 1), *(("after", tokens, 0) for tokens in after)):
        check_int(name, value, least)
    check_int("turns", turns, 1, MOST_NEEDLES)
    check_lengths(lengths, model.config.context)
    check_lengths(after if "distance" in modes else (), model.config.context, "after")
    after = list(dict.fromkeys(after))
    text = between or load_corpus("pydoc:second")
    ids = model.tokenizer("\n\n".join(text.texts), verbose=False).input_ids if "distance" in modes else []
    sentences = None if haystack is None else split_sentences("\n".join(haystack.texts))
    asked = []
    for length in dict.fromkeys(lengths):
        for index in range(samples):
            context = make_context(model.tokenizer, length, turns, seed, index, sentences)
            texts = [cut_text(model.tokenizer, ids, tokens, index) for tokens in after] if ids else []
            asked += questions_of(context, length, index, modes, after if ids else (), texts)
    settings = {"turns": turns, "haystack": _named(haystack), "between": _named(text) if "distance" in modes else None}
    suite = Suite(COMMAND, tuple(asked), seed=seed, rows=rows, dtype=dtype, settings=settings,
                  prefill_chunk=prefill_chunk)
    return evaluate_calibrated(model, methods, suite, calibrate, json=json, progress=progress, mesh=mesh)


def mean_nll(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[int, str], float | None]]:
    """Nats a token of the true answers, by method and by (length, task); None where one is not finite."""
    found: dict[str, dict[tuple[int, str], list[Any]]] = {}
    for record in records:
        cell = found.setdefault(record["method"], {}).setdefault((record["length"], record["task"]), [])
        cell.append(record["answer_nll"])
    return {
        method: {key: None if None in cell else sum(cell) / len(cell) for key, cell in cells.items()}
        for method, cells in found.items()
    }


def _named(corpus: Corpus | None) -> dict[str, str] | None:
    return None if corpus is None else {"name": corpus.name, "sha256": corpus.sha256}
