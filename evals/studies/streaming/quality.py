"""StreamingKV beside Palu: perplexity in domain and after a shift, needles, and which of their choices matter."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.corpus import load_corpus
from lowrank_kv_jax.codecs.palu import GroupedProjections
from lowrank_kv_jax.evals.asking.few_at_a_time import few_at_a_time
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate_calibrated
from lowrank_kv_jax.evals.needle.long import NEW_TOKENS, found_by_task, long_needles
from lowrank_kv_jax.evals.perplexity.run import evaluate_perplexity, total_perplexity
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.evals.studies.streaming.paired_gain import Gain, paired_gain
from lowrank_kv_jax.evals.studies.streaming.shifted_texts import CALIBRATE, PROSE, TASKS, windows_of
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.saving.saved_cache import abstract_cache

COMMAND = "streaming"
ENDS = "sinks=32,recent=32"
"""Exact tokens, the same for every method of a comparison."""
TOGETHER, ROWS = 10, 4
"""Methods that share a prefill, and windows at most; fewer windows are not filled up."""
NEEDLE_ROWS, NEEDLE_ROOM, NEEDLE_LEAST = 4, 128, 0.8
"""Contexts that share a batch; tokens that RULER reserves for an answer; the least context, a share of the length."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        ranks: shares of the width; the paper's 30% and 50% compression are 0.7 and 0.5.
        context, scored: tokens that are compressed, and that are scored through the cache after them.
        windows: texts of each task.
        samples: needles of each task of `long_needles`, in contexts of 0.9 to 1 times `context` tokens; 0 for none.
        seed: of texts and needles.
    """

    ranks: tuple[float, ...] = (0.7, 0.5)
    context: int = 1024
    scored: int = 384
    windows: int = 4
    samples: int = 2
    seed: int = 0

    def __post_init__(self):
        for field, least in (("context", 1), ("scored", 2), ("windows", 1), ("samples", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least {least}")


def quality_specs(rank: float, width: int) -> list[str]:
    """Palu, the paper's form with its steps for this rank, and the coupled form, ranks uniform and by Fisher; then Palu
    at the bytes of the coupled form, whose moving columns are 5% more.

    Args:
        rank: a share of the width.
        width: channels of a group of heads, for the last one's columns: a fraction would be rounded away.
    """
    printed = "longbench-mistral-7b-instruct-v0.2-" + ("30" if rank > 0.6 else "50")
    by_rule = [spec for by in ("uniform", "fisher-sqrt", "fisher") for spec in (
        f"palu:rank={rank},rank_by={by},{ENDS}", f"streamingkv:{printed},rank={rank},rank_by={by},{ENDS}",
        f"streamingkv:rank={rank},rank_by={by},{ENDS}")]
    return [*by_rule, f"palu:rank={round(1.05 * rank * width)},{ENDS}"]


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


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one method.

    Attributes:
        perplexity: by task.
        nll: mean negative log-likelihood of each window, by task.
        needles: percent of the answers that each needle's reply holds, by task; empty where none were asked for.
        needle_tokens: mean length of the needles' contexts, by task.
        smaller: times smaller than a 16-bit full cache of the same tokens, all bytes of a bfloat16 cache counted.
    """

    spec: str
    perplexity: dict[str, float]
    nll: dict[str, list[float]]
    needles: dict[str, list[float]]
    needle_tokens: dict[str, float]
    smaller: float


def scores(
    model: Any, specs: Sequence[str], settings: Settings, tasks: Sequence[str] = TASKS, json: str | None = None,
    progress: bool = False, dtype: str = "float32",
) -> dict[str, Score]:
    """Perplexities and needles by spec, the context compressed before anything of the rest is seen.

    Args:
        tasks: of `shifted_texts`.
        dtype: of the caches that are scored; bytes are always those of a bfloat16 cache.

    Raises:
        ValueError: as `windows_of`, `evaluate_perplexity`, `long_needles` and `evaluate`.
    """
    methods = parse_methods(list(dict.fromkeys(specs)))
    rows: dict[str, Score] = {}
    for some in few_at_a_time(methods, TOGETHER):
        rows |= _scores(model, some, settings, tasks, json, progress, dtype)
    return rows


def _scores(model, methods, settings: Settings, tasks, json, progress, dtype) -> dict[str, Score]:
    length, records = settings.context + settings.scored, {}
    for task in tasks:
        text, cut = windows_of(model.tokenizer, task, settings.context, settings.scored, settings.windows, settings.seed)
        records[task] = evaluate_perplexity(
            model, methods, text, task, length, settings.context, settings.windows, json=json, dtype=dtype,
            rows=min(ROWS, settings.windows), calibrate=load_corpus(CALIBRATE), progress=progress, cut=cut,
        )
    needles = _needles(model, methods, settings, json, progress, dtype) if settings.samples else []
    out = {}
    for spec in methods:
        nll = {task: [_mean_nll(r) for r in own if r["method"] == spec] for task, own in records.items()}
        perplexity = {task: total_perplexity(own, spec) for task, own in records.items()}
        found = found_by_task(needles, spec)
        tokens = {task: float(np.mean([r["context_tokens"] for r in needles if r["task"] == task])) for task in found}
        out[spec] = Score(spec, perplexity, nll, found, tokens, _smaller(model, methods[spec], settings))
    return out


def _needles(model, methods, settings: Settings, json, progress, dtype) -> list[dict[str, Any]]:
    asked = long_needles(model.tokenizer, tuple(NEW_TOKENS), settings.context + NEEDLE_ROOM, settings.samples,
                         settings.seed, least=NEEDLE_LEAST, haystack=PROSE)
    suite = Suite(COMMAND, asked, seed=settings.seed, rows=NEEDLE_ROWS, dtype=dtype)
    return evaluate_calibrated(model, methods, suite, load_corpus(CALIBRATE), json=json, progress=progress)


def _smaller(model, method, settings: Settings) -> float:
    layout = make_layout(model.config, 1, settings.context, settings.context + settings.scored, method.default_block)
    bases = white_bases(model.config.attention, method, layout.dtype)  # of the shapes, and so the bytes, of any others
    return cache_bytes(abstract_cache(method, layout, bases), bases).smaller


def _mean_nll(record: dict[str, Any]) -> float:
    return float("inf") if record["nll"] is None else record["nll"] / record["scored_tokens"]


def text_gains(rows: Mapping[str, Score], seed: int = 0) -> list[Gain]:
    """Log-likelihoods of texts, in nats a token; `seed` is the bootstrap's."""
    def likelihood(row: Score) -> dict[str, list[float]]:
        return {task: [-x for x in own] for task, own in row.nll.items()}

    return [paired_gain(spec, over, why, likelihood(rows[spec]), likelihood(rows[over]), seed)
            for spec, over, why in opponents(rows)]


def needle_gains(rows: Mapping[str, Score], seed: int = 0) -> list[Gain]:
    """Needles, in percent of the answers; without any, nothing. `seed` is the bootstrap's."""
    return [paired_gain(spec, over, why, rows[spec].needles, rows[over].needles, seed)
            for spec, over, why in opponents(rows) if rows[spec].needles]


def with_prefill(specs: Sequence[str], prefill: str) -> list[str]:
    """Low-rank specs whose prompt attends to its own keys and values ("exact", as it does by default) or to what they are
    coded as ("compressed")."""
    return list(specs) if prefill == "exact" else [f"{spec},prefill={prefill}" for spec in specs]


def opponents(rows: Mapping[str, Score]) -> list[tuple[str, str, str]]:
    """What is compared with what, and why: a learning method with Palu at the same ranks and at the same bytes (to 1%),
    Palu's ranks by Fisher information with uniform ones; prompts attend to the same in both."""
    methods = parse_methods(list(rows))
    palus = {spec: method for spec, method in methods.items()
             if method.projects and not method.adapts}
    out = []
    for spec, method in methods.items():
        for over, palu in palus.items():
            why = _why(method, palu, rows[spec].smaller / rows[over].smaller) if spec != over else None
            if why:
                out.append((spec, over, why))
    return out


def _why(method: Part, palu: GroupedProjections, bytes_ratio: float) -> str | None:
    if not method.projects or (method.head_group, method.prefill) != (palu.head_group, palu.prefill):
        return None
    sizes = [(m.rank, m.rank_k, m.rank_v, m.energy, m.bits) for m in (method, palu)]
    if not method.adapts:
        better = method.rank_by != "uniform" == palu.rank_by
        return "uniform ranks" if better and sizes[0] == sizes[1] else None
    if method.rank_by != palu.rank_by:
        return None
    if sizes[0] == sizes[1]:
        return "the same ranks"
    return "the same bytes" if abs(bytes_ratio - 1) < 0.01 else None
