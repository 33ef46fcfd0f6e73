"""Basis estimators side by side: error, time and bytes on a changing stream and on text that turns to code."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.estimators import ESTIMATORS, Estimator, make_estimator
from lowrank_kv_jax.evals.studies.bases.piecewise_stream import piecewise_stream, segment_error

SETTLE = 10  # times that the prefill batch is shown at the start: rules that take steps need several


def stream_table(names: Sequence[str] | None = None, seeds: int = 3, rank: int = 6) -> list[dict[str, Any]]:
    """StreamingKV, A.6: mean excess error of bases that stay, that are fitted at each change, and that follow.

    Estimators that keep energies forget the past at each change; the others by their steps.

    Returns:
        Rows of "estimator", "static", "prefill", "decode" (share of the energy lost beyond the best basis of the rank).
    """
    rows = []
    for name in names or sorted(ESTIMATORS):
        made = make_estimator(name, size=2 * rank)
        step = jax.jit(made.update)
        errors: dict[str, list[float]] = {"static": [], "prefill": [], "decode": []}
        for seed in range(seeds):
            segments = piecewise_stream(seed=seed)
            learned = _settled(made, step, segments[0].prefill)
            static = made.basis(learned, rank)
            for segment in segments[1:]:
                learned = step(made.forget(learned, 0.02), segment.prefill)
                early = made.basis(learned, rank)
                for batch in segment.decode:
                    bases = {"static": static, "prefill": early, "decode": made.basis(learned, rank)}
                    for kind, basis in bases.items():
                        errors[kind].append(segment_error(np.asarray(basis), segment))
                    learned = step(learned, batch)
        rows.append({"estimator": name, **{kind: float(np.mean(x)) for kind, x in errors.items()}})
    return rows


def _settled(made: Estimator, step, batch) -> Any:
    learned = made.init((), batch.shape[-1])
    for _ in range(SETTLE):
        learned = step(learned, batch)
    return learned


def shift_table(
    model: Any, shifted: np.ndarray, rank: int, page: int = 128, window: int = 256, tap: str = "v",
    names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """RER of each page in the basis learned from the pages before it, for text that turns to code in its middle.

    Args:
        shifted: int32 `[1, S]`.
        rank: of the bases.
        page: tokens of an update.
        window: time constant in tokens of estimators that forget.
        tap: "k" or "v".

    Returns:
        Rows of "estimator", mean RER "before" the shift, on the first page "at" it, and "after" that page, "oracle" (each
        page in its own basis, after), milliseconds of an "update" of a layer's heads and of a "basis", "bytes" a head.
    """
    layers = [np.asarray(getattr(taps, tap)[0], np.float32) for taps in iterate_taps(model.config, model.params, shifted)]
    x = jnp.asarray(np.stack(layers)).swapaxes(1, 2)  # [L, K, S, D]
    pages = x.shape[2] // page
    x = x[:, :, : pages * page].reshape(*x.shape[:2], pages, page, -1)
    middle = shifted.shape[1] // 2 // page
    oracle = [_lost(_best(x[:, :, i], rank), x[:, :, i]) for i in range(middle + 1, pages)]
    rows = []
    for name in names or sorted(ESTIMATORS):
        made = make_estimator(name, size=2 * rank)
        learned = made.init(x.shape[:2], x.shape[-1])
        step = jax.jit(lambda s, t, made=made: made.update(made.forget(s, np.exp(-page / window)), t))
        basis = jax.jit(lambda s, made=made: made.basis(s, rank))
        losses, times = [], {"update": [], "basis": []}
        for i in range(pages):
            began = time.perf_counter()
            u = jax.block_until_ready(basis(learned))
            times["basis"].append(time.perf_counter() - began)
            losses.append(_lost(u, x[:, :, i]))
            began = time.perf_counter()
            learned = jax.block_until_ready(step(learned, x[:, :, i]))
            times["update"].append(time.perf_counter() - began)
        per_layer = {key: 1e3 * float(np.median(value[1:])) / len(x) for key, value in times.items()}
        heads = x.shape[0] * x.shape[1]
        rows.append({
            "estimator": name, "before": float(np.mean(losses[1:middle])), "at": losses[middle],
            "after": float(np.mean(losses[middle + 1 :])), "oracle": float(np.mean(oracle)),
            "update_ms": per_layer["update"], "basis_ms": per_layer["basis"],
            "bytes": sum(a.nbytes for a in jax.tree.leaves(learned)) // heads,
        })
    return rows


@jax.jit
def _energies(u: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.matmul(x, u) ** 2, (-2, -1)), jnp.sum(x**2, (-2, -1))


def _lost(u: jax.Array, x: jax.Array) -> float:
    held, total = _energies(u, x)
    return float(jnp.mean(1 - held / total))


def _best(x: jax.Array, rank: int) -> jax.Array:
    made = make_estimator("covariance")
    return made.basis(made.update(made.init(x.shape[:-2], x.shape[-1]), x), rank)
