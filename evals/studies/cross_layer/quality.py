"""xKV against Single SVD and MiniCache at equal bytes, and keys and values alone (table 1 and figure 5 of the paper)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate
from lowrank_kv_jax.evals.needle.long import found_by_task, long_needles
from lowrank_kv_jax.evals.perplexity.run import evaluate_perplexity, total_perplexity
from lowrank_kv_jax.evals.studies.cross_layer.cost import smaller_at

COMMAND = "cross-layer quality"
NEEDLES = ("niah_single_1", "niah_multikey_1", "niah_multivalue")

MINICACHE = "minicache:start=14"
"""1.3 times smaller on a model of 30 layers."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        ratios: all bytes, so many times smaller than a 16-bit full cache of the prompt.
        groups: layers that share a basis; 1 is the Single SVD.
        samples: needles of each task and length.
        windows, scored: texts for the perplexity, and tokens of each that are scored through the cache.
        seed: of the needles.
        fields: of every cross-layer method, e.g. "bits=8,basis_dtype=int8".
    """

    ratios: tuple[float, ...] = (2.5, 4.0, 8.0)
    groups: tuple[int, ...] = (1, 2, 3, 5, 6)
    samples: int = 6
    windows: int = 4
    scored: int = 256
    seed: int = 0
    fields: str = ""


def equal_bytes_specs(settings: Settings) -> list[str]:
    """The full cache, MiniCache, and every group size at every ratio."""
    extra = f",{settings.fields}" if settings.fields else ""
    cross = [f"xkv:group={g},smaller={r}{extra}" for r in settings.ratios for g in settings.groups]
    return ["full", MINICACHE, *cross]


def one_sided_specs(spec: AttentionSpec, settings: Settings, length: int) -> list[str]:
    """Keys alone, and values alone, compressed so that their 16-bit coefficients and bases meet each ratio."""
    out = ["full"]
    for group in settings.groups:
        width = group * spec.kv_heads * spec.head_dim
        for ratio in settings.ratios:
            rank = max(int(length * width / (ratio * (length + width))), 1)
            out += [f"xkv:group={group},rank_k={rank},rank_v=1.0", f"xkv:group={group},rank_k=1.0,rank_v={rank}"]
    return out


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one method at one length.

    Attributes:
        needles: percent of the needles found, by task.
        perplexity: of text that is scored through the cache.
        smaller: all bytes of a cache of `length` tokens and a block of new ones against a 16-bit full cache.
    """

    spec: str
    length: int
    needles: Mapping[str, float]
    perplexity: float
    smaller: float

    @property
    def needle(self) -> float:
        """Mean over the tasks."""
        return float(np.mean(list(self.needles.values())))


def quality(
    model: Any, specs: Sequence[str], settings: Settings, length: int, json: str | None = None, progress: bool = False
) -> list[Score]:
    """Needles and perplexity of every method at one length, contexts compressed before the question is known."""
    methods = parse_methods(specs)
    asked = long_needles(model.tokenizer, NEEDLES, length, settings.samples, settings.seed)
    suite = Suite(COMMAND, asked, seed=settings.seed, rows=2)
    needles = evaluate(model, methods, suite, json=json, progress=progress)
    texts = evaluate_perplexity(
        model, methods, None, "stream", length + settings.scored, length, settings.windows, json=json, rows=2,
        progress=progress,
    )
    out = []
    for spec, method in methods.items():
        found = {task: float(np.mean(scores)) for task, scores in found_by_task(needles, spec).items()}
        reached = smaller_at(method, model.config.attention, length)
        out.append(Score(spec, length, found, total_perplexity(texts, spec), reached))
    return out
