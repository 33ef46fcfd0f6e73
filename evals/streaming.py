"""StreamingKV beside Palu: perplexity in domain and after a shift, needles, and which of their choices matter."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.accounting import cache_bytes
from lowrank_kv_jax.corpus import Corpus, load_corpus, token_windows
from lowrank_kv_jax.evals.compare import parse_methods
from lowrank_kv_jax.evals.few_at_a_time import few_at_a_time
from lowrank_kv_jax.evals.needle_grid import evaluate_needles
from lowrank_kv_jax.evals.perplexity_run import Window, evaluate_perplexity, total_perplexity
from lowrank_kv_jax.evals.report.statistics import wilcoxon_p
from lowrank_kv_jax.evals.roofline import white_bases
from lowrank_kv_jax.forward import make_layout
from lowrank_kv_jax.saved_cache import abstract_cache

TASKS = ("prose", "code", "prose, then code")
"""Calibration is on prose: in domain, after a shift, and a shift within the sequence."""
ENDS = "sinks=32,recent=32"
"""Exact tokens, the same for every method of a comparison."""
TOGETHER = 10
"""Methods that share a prefill."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        ranks: shares of the width; the paper's 30% and 50% compression are 0.7 and 0.5.
        context, scored: tokens that are compressed, and that are scored through the cache after them.
        windows: texts of each task.
        depths, samples: needles at each of so many depths; no samples, no needles.
        needle_length: tokens of a needle's prompt.
        prose, code, calibrate: texts, as `load_corpus` names them.
    """

    ranks: tuple[float, ...] = (0.7, 0.5)
    context: int = 1024
    scored: int = 384
    windows: int = 4
    depths: int = 4
    samples: int = 2
    needle_length: int = 1024
    seed: int = 0
    prose: str = "pydoc:second"
    code: str = "python"
    calibrate: str = "pydoc:first"

    def __post_init__(self):
        for field, least in (("context", 1), ("scored", 2), ("windows", 1), ("samples", 0), ("depths", 2)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least {least}")


def quality_specs(rank: float) -> list[str]:
    """Palu, the paper's form with its steps for this rank, and the coupled form, ranks uniform and by Fisher; then Palu
    at the bytes of the coupled form, whose moving columns are 5% more."""
    printed = "longbench-mistral-7b-instruct-v0.2-" + ("30" if rank > 0.6 else "50")
    by_rule = [spec for by in ("uniform", "fisher-sqrt", "fisher")[: 3 if rank == 0.5 else 2] for spec in (
        f"palu:rank={rank},rank_by={by},{ENDS}", f"streamingkv:{printed},rank={rank},rank_by={by},{ENDS}",
        f"streamingkv:rank={rank},rank_by={by},{ENDS}")]
    return [*by_rule, f"palu:rank={round(1.05 * rank, 3)},{ENDS}"]


def ablation_specs(rank: float) -> list[str]:
    """Tables 3 and 4: triangle, joint or group (heads alone: J = 1 has nothing to join), alpha and eta, in both forms."""
    printed = f"streamingkv:paper,rank={rank},rank_by=uniform,{ENDS}"
    coupled = f"streamingkv:rank={rank},{ENDS}"
    alone = ",head_group=1"
    return [
        f"palu:rank={rank},{ENDS}", f"palu:rank={rank},{ENDS}{alone}", printed, coupled,
        *(f"{base},triangle={triangle}" for base in (printed, coupled) for triangle in ("full", "printed")),
        *(f"{base}{alone},update={update}" for base in (printed, coupled) for update in ("group", "joint")),
        *(f"{printed},eta={eta},eta_dec={eta}" for eta in (1e-6, 1e-5, 5e-5)),
        *(f"{printed},alpha={alpha}" for alpha in (0.05, 0.1)),
        *(f"{coupled},eta={eta}" for eta in (0.1, 0.3)),
        *(f"{coupled},eta_dec={eta}" for eta in (0, 0.1, 0.3)), f"{coupled},step=10",
        *(f"{coupled},alpha={alpha}" for alpha in (0.05, 0.1, 0.5, 1.0)),
        f"{coupled},transport=false", f"{coupled},eta=0,eta_dec=0",
    ]


def shifted_windows(model: Any, settings: Settings, task: str) -> tuple[Corpus, list[Window]]:
    """Windows of a task, and where they are from."""
    prose, code = (load_corpus(name) for name in (settings.prose, settings.code))
    length = settings.context + settings.scored

    def ids(corpus: Corpus) -> np.ndarray:
        return token_windows(model.tokenizer, corpus.texts, length, settings.windows, settings.seed)

    first = ids(code if task == "code" else prose)
    second = ids(prose if task == "prose" else code)
    cut = [
        Window(i, tuple(map(int, a[: settings.context])), tuple(map(int, b[settings.context :])))
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    both = Corpus.of(prose.texts + code.texts, f"{prose.name}>{code.name}")
    return {"prose": prose, "code": code}.get(task, both), cut


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one method.

    Attributes:
        perplexity: by task.
        nll: mean negative log-likelihood of each window, by task.
        needle: found, in percent; None where none were asked for.
        needles: score of each.
        smaller: times smaller than a 16-bit full cache of the same tokens, all bytes of a bfloat16 cache counted.
    """

    spec: str
    perplexity: dict[str, float]
    nll: dict[str, list[float]]
    needle: float | None
    needles: list[float]
    smaller: float


def scores(
    model: Any, specs: Sequence[str], settings: Settings, tasks: Sequence[str] = TASKS, json: str | None = None,
    progress: bool = False, dtype: str = "float32",
) -> dict[str, Score]:
    """Perplexities and needles by spec, the context compressed before anything of the rest is seen.

    Args:
        dtype: of the caches that are scored; bytes are always those of a bfloat16 cache.

    Raises:
        ValueError: as `evaluate_perplexity` and `evaluate_needles`.
    """
    methods = parse_methods(list(dict.fromkeys(specs)))
    rows: dict[str, Score] = {}
    for some in few_at_a_time(methods, TOGETHER):
        rows |= _scores(model, some, settings, tasks, json, progress, dtype)
    return rows


def _scores(model, methods, settings: Settings, tasks, json, progress, dtype) -> dict[str, Score]:
    calibrate = load_corpus(settings.calibrate)
    length, records = settings.context + settings.scored, {}
    for task in tasks:
        text, cut = shifted_windows(model, settings, task)
        records[task] = evaluate_perplexity(
            model, methods, text, task, length, settings.context, settings.windows, json=json, dtype=dtype,
            calibrate=calibrate, progress=progress, cut=cut,
        )
    needles = [] if settings.samples == 0 else evaluate_needles(
        model, methods, [settings.needle_length], settings.depths, settings.samples, seed=settings.seed, json=json,
        rows=settings.depths, dtype=dtype, calibrate=calibrate, progress=progress,
    )
    out = {}
    for spec in methods:
        found = [r["score"] for r in needles if r["method"] == spec]
        nll = {task: [_mean_nll(r) for r in own if r["method"] == spec] for task, own in records.items()}
        out[spec] = Score(
            spec, {task: total_perplexity(own, spec) for task, own in records.items()}, nll,
            float(np.mean(found)) if found else None, found, _smaller(model, methods[spec], settings),
        )
    return out


def _smaller(model, method, settings: Settings) -> float:
    layout = make_layout(model.config, 1, settings.context, settings.context + settings.scored)
    bases = white_bases(model.config.attention, method, layout.dtype)  # of the shapes, and so the bytes, of any others
    return cache_bytes(abstract_cache(method, layout, bases), bases).smaller


def _mean_nll(record: dict[str, Any]) -> float:
    return float("inf") if record["nll"] is None else record["nll"] / record["scored_tokens"]


@dataclasses.dataclass(frozen=True)
class Gain:
    """Of one method over another on the same windows: their mean log-likelihoods subtracted, in nats a token.

    Attributes:
        mean: positive where `spec` is better.
        wins, windows: windows where it is.
        p: two-sided, of Wilcoxon's signed-rank test over all windows of all tasks.
    """

    spec: str
    over: str
    mean: float
    wins: int
    windows: int
    p: float | None


def gain(score: Score, over: Score) -> Gain:
    """Paired comparison over the windows of every task."""
    tasks = score.nll
    differences = np.array([b - a for task in tasks for a, b in zip(score.nll[task], over.nll[task], strict=True)])
    return Gain(score.spec, over.spec, float(differences.mean()), int((differences > 0).sum()), len(differences),
                wilcoxon_p(differences))
