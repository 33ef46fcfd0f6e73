"""The studies of eviction: its error inside of layers, MomentKV's ablation, rules at equal bytes, OjaKV's table 6."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.accounting import cache_bytes
from lowrank_kv_jax.corpus import load_corpus, token_windows
from lowrank_kv_jax.evals.compare import parse_methods
from lowrank_kv_jax.evals.eviction_error import LayerError, eviction_errors
from lowrank_kv_jax.evals.needle_grid import evaluate_needles
from lowrank_kv_jax.evals.perplexity_run import evaluate_perplexity, total_perplexity
from lowrank_kv_jax.forward import DEFAULT_BLOCK, make_layout
from lowrank_kv_jax.saved_cache import abstract_cache

STUDIES = ("error", "ablation", "bytes", "ojakv")
BASELINES = ("h2o", "snapkv", "pyramidkv", "adakv")
TABLE_6 = {"full": "100%", "snapkv:keep=0.5,decoding=keep": "50%", "ojakv:rank=0.6": "60%",
           "ojakv:rank=0.6+snapkv:keep=0.5,decoding=keep": "30%"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a study measures.

    Attributes:
        length: of the prompt, in tokens.
        budgets: tokens a kv head keeps.
        windows, scored: texts for the perplexity, and tokens of each that are scored through the cache.
        depths, samples: needles at each of so many depths.
        seed: of needles and texts.
        text: what errors are measured on.
    """

    length: int = 2048
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    windows: int = 4
    scored: int = 256
    depths: int = 4
    samples: int = 2
    seed: int = 0
    text: str | tuple[str, ...] = "pydoc:second"


def error_table(model: Any, settings: Settings) -> list[LayerError]:
    """Errors of each layer, of H2O and of MomentKV's selection, at every budget."""
    corpus = load_corpus(settings.text)
    windows = token_windows(model.tokenizer, corpus.texts, settings.length + DEFAULT_BLOCK, 1, settings.seed)
    specs = [spec for budget in settings.budgets for spec in (
        f"h2o:budget={budget}+moments:order=gaussian", f"momentkv:budget={budget},order=gaussian")]
    return eviction_errors(model, parse_methods(specs), np.asarray(windows[0]), DEFAULT_BLOCK)


def means(rows: Sequence[LayerError]) -> dict[str, dict[str, float]]:
    """Means over the layers, by spec."""
    out: dict[str, dict[str, float]] = {}
    for spec in dict.fromkeys(row.spec for row in rows):
        own = [dataclasses.asdict(row) for row in rows if row.spec == spec]
        flat = [{k: v for k, v in row.items() if isinstance(v, float)}
                | {f"{k}_{o}": v for k, d in row.items() if isinstance(d, dict) for o, v in d.items()} for row in own]
        out[spec] = {name: float(np.mean([row[name] for row in flat])) for name in flat[0]}
    return out


def ablation_specs(budget: int) -> list[str]:
    """MomentKV without, with either and with both of its mechanisms, and by order of the approximation."""
    base = f"momentkv:budget={budget}"
    return [f"{base},mi=false,nc=false", f"{base},nc=false", f"{base},mi=false", base, f"{base},prefill=literal",
            f"{base},order=0", f"{base},order=gaussian"]


def equal_bytes_specs(model: Any, settings: Settings, budget: int) -> list[str]:
    """MomentKV at `budget` tokens, and the others at the bytes that it takes, statistics included."""
    spec = f"momentkv:budget={budget}"
    layout = make_layout(model.config, 1, settings.length, settings.length + settings.scored)
    spent = cache_bytes(abstract_cache(parse_methods([spec])[spec], layout)).total
    return [*(f"{name}:budget_bytes={spent},recent=32" for name in BASELINES), spec]


def study_specs(model: Any, study: str, settings: Settings) -> list[str]:
    """The methods of a study that scores methods."""
    if study == "ojakv":
        return list(TABLE_6)
    specs = ["full"]
    for budget in settings.budgets:
        specs += ablation_specs(budget) if study == "ablation" else equal_bytes_specs(model, settings, budget)
    return specs


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one method: perplexity through the cache, needles found in percent, bytes of a row of the needle's cache."""

    spec: str
    perplexity: float
    needle: float | None
    cache_bytes: int
    full_bytes: int


def scores(model: Any, specs: Sequence[str], settings: Settings, json: str | None = None, progress: bool = False):
    """Perplexity and needles of every method, context compressed before the question is known."""
    methods = parse_methods(specs)
    text = load_corpus(settings.text)
    texts = evaluate_perplexity(
        model, methods, text, "stream", settings.length + settings.scored, settings.length, settings.windows, json=json,
        progress=progress,
    )
    needles = [] if settings.samples == 0 else evaluate_needles(
        model, methods, [settings.length], settings.depths, settings.samples, seed=settings.seed, json=json,
        progress=progress,
    )
    rows = []
    for spec in methods:
        found = [r["score"] for r in needles if r["method"] == spec]
        record = next(r for r in texts if r["method"] == spec)
        rows.append(Score(spec, total_perplexity(texts, spec), float(np.mean(found)) if found else None,
                          record["cache_bytes"], record["full_cache_bytes"]))
    return rows
