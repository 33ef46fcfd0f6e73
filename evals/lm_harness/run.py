"""lm-eval's tasks through compressed caches, one record a document."""

import hashlib
import json as json_format
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus
from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.checks.models import weights_dtype
from lowrank_kv_jax.evals.asking.methods import bases_of, calibration_settings, check_methods, conditions_of
from lowrank_kv_jax.evals.lm_harness.tasks import TASKS, load_tasks
from lowrank_kv_jax.evals.results.records import append_record, make_record
from lowrank_kv_jax.evals.results.resume import Key, finished, key_of
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

COMMAND = "eval lm-eval"
SEED = 1234  # lm-eval's own for its few-shot examples
CHUNK = 32  # documents that are scored before their records are written; solved examples are drawn anew for each so many


def evaluate_lm_eval(
    model: Any, methods: Mapping[str, Part], tasks: Sequence[str] | Mapping[str, Any] = TASKS, samples: int | None = None,
    fewshot: int | None = None, seed: int = SEED, *, data: str | os.PathLike | None = None,
    json: str | os.PathLike | None = None, rows: int = 8, dtype: str | None = None, calibrate: Corpus | None = None,
    progress: bool = False, mesh: Any = None, prefill_chunk: int | None = None,
) -> list[dict[str, Any]]:
    """Score methods on tasks of lm-eval.

    Args:
        tasks, data: see `load_tasks`; or what that has loaded, with the same `fewshot` and `seed`.
        samples: the first documents of each task; None for all.
        fewshot, seed: solved examples in front of each question, and the seed of their choice.
        rows: contexts that share a batch.

    The other arguments are those of `evaluate_ruler`.

    Returns:
        One record for each document and method: `score` is 100 * acc_norm where the task has it, else 100 * its
        first metric; every metric stands beside it, with the log-likelihood of each choice, null where it is not finite.

    Raises:
        ValueError: lm-eval is not installed, no tokenizer, a file of another run, or as `load_tasks`.
    """
    check_methods(model, methods, COMMAND)
    require_lm_eval()
    loaded = tasks if isinstance(tasks, Mapping) else load_tasks(tasks, data, fewshot, seed)
    documents = {name: list(task.eval_docs)[:samples] for name, task in loaded.items()}
    corpus, dtype = calibrate or load_corpus("pydoc:first"), dtype or default_cache_dtype()
    conditions = {"fewshot": fewshot, "fewshot_drawn_for": CHUNK if fewshot else None,
                  "weights_dtype": weights_dtype(model), "cache_dtype": dtype, "prefill_chunk": prefill_chunk,
                  **calibration_settings(corpus, methods)}
    wanted: dict[Key, dict[str, Any]] = {
        _key(model, spec, task, index, seed): conditions_of(conditions, method) | {"document_sha256": _digest(document)}
        for task, rest in documents.items() for index, document in enumerate(rest) for spec, method in methods.items()
    }
    known = {} if json is None else finished(json, wanted)
    pending = {
        (spec, task): left for spec in methods for task, rest in documents.items()
        if (left := [i for i in range(len(rest)) if _key(model, spec, task, i, seed) not in known])
    }
    needed = {spec: method for spec, method in methods.items() if any(spec == other for other, _ in pending)}
    bases = bases_of(model, needed, corpus, dtype=dtype, progress=progress)
    with ProgressBar(COMMAND, sum(map(len, pending.values())), progress) as bar:
        for spec, method in needed.items():
            adapter = _adapter(model, method, bases.get(spec), dtype, rows, mesh, prefill_chunk)
            for task in (task for other, task in pending if other == spec):
                left = set(pending[spec, task])
                for block in sorted({index // CHUNK for index in left}):
                    chunk = list(range(block * CHUNK, min((block + 1) * CHUNK, len(documents[task]))))
                    loaded[task].set_fewshot_seed(seed=seed + block)  # the same examples for every method and every run
                    for values in _score(adapter, loaded[task], task, chunk):
                        key = _key(model, spec, task, values["index"], seed)
                        if key in known:
                            continue
                        record = make_record(
                            COMMAND, model=model.name, fingerprint=model.fingerprint, method=spec, task=task,
                            samples=1, seed=seed, **wanted[key], **values,
                        )
                        assert key_of(record) == key
                        known[key] = record
                        if json is not None:
                            append_record(json, record)
                    bar.advance(len(left.intersection(chunk)))
    return [known[key] for key in wanted]


def require_lm_eval() -> None:
    """Raise ValueError, with the remedy, unless lm-eval can be imported."""
    check_extra("lm_eval", "eval lm-eval")


def _adapter(
    model: Any, method: Part, bases: Any, dtype: str, rows: int, mesh: Any, prefill_chunk: int | None
) -> Any:
    from lowrank_kv_jax.evals.lm_harness.model import LowRankKV

    return LowRankKV(model, spell_method(method), bases, cache_dtype=dtype, batch_size=rows, mesh=mesh,
                     progress=False, prefill_chunk=prefill_chunk)


def _score(adapter: Any, task: Any, name: str, chunk: list[int]) -> Iterator[dict[str, Any]]:
    """What the records of some documents hold."""
    from lm_eval.evaluator import evaluate

    found = evaluate(
        adapter, {"tasks": {name: task}, "groups": {}, "group_map": {}}, samples={name: chunk}, bootstrap_iters=0
    )
    for sample in found["samples"][name]:
        metrics = {metric: float(sample[metric]) for metric in sample["metrics"]}
        scored = [one for pair in sample["arguments"] if (one := adapter.scored.get(_pair(pair))) is not None]
        times = [one.ttft_s for one in scored if one.ttft_s is not None]
        yield {
            "index": sample["doc_id"], "score": 100 * metrics.get("acc_norm", next(iter(metrics.values()))),
            "metrics": metrics, "logprobs": [_finite(float(one[0])) for one in sample["filtered_resps"]],
            "ttft_s": float(np.mean(times)) if times else None, **_size([one.size for one in scored]),
        }
    adapter.scored.clear()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _pair(arguments: Any) -> tuple[str, str]:
    return arguments[0], arguments[1]


def _size(sizes: Sequence[Any]) -> dict[str, Any]:
    """Of the caches that a document was scored through, on average."""
    if not sizes:
        return {}
    return {
        "cache_bytes": int(np.mean([size.total for size in sizes])), "shared_bytes": sizes[0].shared,
        "full_cache_bytes": int(np.mean([size.full for size in sizes])),
        "bytes_per_token": float(np.mean([size.per_token for size in sizes])),
        "bytes_by_kind": {kind: int(np.mean([size.by_kind[kind] for size in sizes])) for kind in sizes[0].by_kind},
        "smaller": float(np.mean([size.smaller for size in sizes])),
        "smaller_apart": float(np.mean([size.smaller_apart for size in sizes])),
        "nominal_smaller": sizes[0].nominal_smaller,
        "compressed_fraction": float(np.mean([size.compressed for size in sizes])),
    }


def _key(model: Any, spec: str, task: str, index: int, seed: int) -> Key:
    return COMMAND, model.fingerprint, spec, task, None, index, None, seed


def _digest(document: Any) -> str:
    return hashlib.sha256(json_format.dumps(document, sort_keys=True, default=str).encode()).hexdigest()
