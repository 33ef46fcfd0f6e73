"""The studies of eviction: its error inside of layers, MomentKV's ablation, rules at equal bytes, OjaKV's table 6."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.evals.asking.few_at_a_time import few_at_a_time
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.needle.grid import evaluate_needles
from lowrank_kv_jax.evals.perplexity.run import evaluate_perplexity, total_perplexity
from lowrank_kv_jax.evals.studies.eviction.error import LayerError, eviction_errors, mean_error
from lowrank_kv_jax.evals.studies.eviction.precision import PrecisionError, precision_errors
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK, make_layout
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.saving.saved_cache import abstract_cache

BASELINES = ("h2o", "snapkv", "pyramidkv", "adakv")
NOMINAL = {"full": 1.0, "snapkv:keep=0.5,decoding=keep": 0.5, "ojakv:follow,rank=0.6": 0.6,
           "ojakv:follow,rank=0.6+snapkv:keep=0.5,decoding=keep": 0.3}
"""The caches of OjaKV's table 6, with the share of the bytes that rank and budget alone stand for."""
SCORED = ("ablation", "bytes", "ojakv")
MOST_WINDOWS = 16
"""Different texts that are evicted; further ones are the same again."""
TOGETHER = 12
"""Methods that share a prefill."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a study measures.

    Attributes:
        length: of the prompt, in tokens.
        budgets: tokens a kv head keeps.
        windows, scored: texts for the perplexity, and tokens of each that are scored through the cache.
        depths, samples: needles at each of so many depths; no samples, no needles.
        seed: of needles, and of the windows of texts that errors and precision are measured on; perplexity is of the
            first ones at every seed.
        text: what errors and perplexity are measured on.
    """

    length: int = 2048
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    windows: int = 4
    scored: int = 256
    depths: int = 4
    samples: int = 2
    seed: int = 0
    text: str | tuple[str, ...] = "pydoc:second"

    def __post_init__(self):
        for field, least in (("length", 1), ("windows", 1), ("scored", 1), ("samples", 0), ("depths", 2)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least {least}")
        wrong = [budget for budget in self.budgets if not 1 <= budget < self.length]
        if wrong or not self.budgets:
            raise ValueError(f"budgets={list(self.budgets)}: each must lie in 1..{self.length - 1}, below the length")


# ---- errors inside of layers ----------------------------------------------------------------------------------------


def error_specs(budgets: Sequence[int]) -> list[str]:
    """H2O as in figures 2 and 3 of the paper, MomentKV's own selection, and the paper's literal one."""
    return [spec for budget in budgets for spec in (
        f"h2o:budget={budget}+moments:order=gaussian", f"momentkv:budget={budget},order=gaussian",
        f"momentkv:budget={budget},order=gaussian,prefill=literal")]


def errors_by_text(model: Any, settings: Settings) -> list[list[LayerError]]:
    """Errors of each layer that is measured at every budget, for each of `windows` texts; `error.average` takes their
    means."""
    corpus = load_corpus(settings.text)
    texts = token_windows(
        model.tokenizer, corpus.texts, settings.length + DEFAULT_BLOCK, settings.windows, settings.seed)
    methods = parse_methods(error_specs(settings.budgets))
    return [eviction_errors(model, methods, np.asarray(text), DEFAULT_BLOCK) for text in texts]


def precision_table(
    model: Any, settings: Settings, evictions: Sequence[int], progress: bool = False
) -> list[PrecisionError]:
    """Moments of both orders in 16 bits after so many evictions; see `precision_errors`."""
    count = min(-(-max(evictions) // settings.length), MOST_WINDOWS)
    windows = token_windows(model.tokenizer, load_corpus(settings.text).texts, settings.length, count, settings.seed)
    return precision_errors(model, windows, evictions, progress=progress)


def means(rows: Sequence[LayerError]) -> dict[str, LayerError]:
    """Means over the layers, by spec; `layer` is -1."""
    specs = dict.fromkeys(row.spec for row in rows)
    return {spec: mean_error([row for row in rows if row.spec == spec], -1) for spec in specs}


# ---- scores ---------------------------------------------------------------------------------------------------------


def ablation_specs(budget: int) -> list[str]:
    """MomentKV without, with either and with both of its mechanisms, then the approximation's order, then literally."""
    base = f"momentkv:budget={budget}"
    return [f"{base},mi=false,nc=false", f"{base},nc=false", f"{base},mi=false", base,
            f"{base},mi=false,order=0", f"{base},mi=false,order=gaussian", f"{base},prefill=literal"]


def equal_bytes_specs(model: Any, settings: Settings, budget: int) -> list[str]:
    """MomentKV at `budget` tokens, and the others at the bytes that it takes, statistics included.

    H2O's recent tokens are half of `budget`, as its own default is; the others keep MomentKV's window of 32.
    """
    spec = f"momentkv:budget={budget}"
    layout = make_layout(model.config, 1, settings.length, settings.length + settings.scored)
    spent = cache_bytes(abstract_cache(parse_methods([spec])[spec], layout)).total
    recent = {"h2o": budget // 2}
    return [*(f"{name}:budget_bytes={spent},recent={recent.get(name, 32)}" for name in BASELINES), spec]


def study_specs(model: Any, study: str, settings: Settings) -> list[str]:
    """The methods of one of `SCORED`."""
    if study == "ojakv":
        return list(NOMINAL)
    specs = ["full"]
    for budget in settings.budgets:
        specs += ablation_specs(budget) if study == "ablation" else equal_bytes_specs(model, settings, budget)
    return specs


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one method.

    Attributes:
        spec: the method.
        perplexity: of all scored tokens.
        needle: needles found, in percent; None where none were asked for.
        cache_bytes, full_bytes: of a row of the perplexity's cache, and of a 16-bit full cache.
    """

    spec: str
    perplexity: float
    needle: float | None
    cache_bytes: int
    full_bytes: int


def scores(
    model: Any, specs: Sequence[str], settings: Settings, json: str | None = None, progress: bool = False
) -> dict[str, Score]:
    """Perplexity and needles by spec, the context compressed before the question is known.

    Raises:
        ValueError: as `evaluate_perplexity` and `evaluate_needles`.
    """
    methods = parse_methods(list(dict.fromkeys(specs)))
    rows: dict[str, Score] = {}
    for some in few_at_a_time(methods, TOGETHER):
        rows |= _scores(model, some, settings, json, progress)
    return rows


def _scores(model, methods, settings: Settings, json: str | None, progress: bool) -> dict[str, Score]:
    texts = evaluate_perplexity(
        model, methods, load_corpus(settings.text), "stream", settings.length + settings.scored, settings.length,
        settings.windows, json=json, progress=progress,
    )
    needles = [] if settings.samples == 0 else evaluate_needles(
        model, methods, [settings.length], settings.depths, settings.samples, seed=settings.seed, json=json,
        rows=settings.depths, progress=progress,
    )
    rows = {}
    for spec in methods:
        found = [r["score"] for r in needles if r["method"] == spec]
        record = next(r for r in texts if r["method"] == spec)
        rows[spec] = Score(spec, total_perplexity(texts, spec), float(np.mean(found)) if found else None,
                           record["cache_bytes"], record["full_cache_bytes"])
    return rows
