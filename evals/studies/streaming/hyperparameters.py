"""What scores owe to the choice of hyperparameters (StreamingKV, A.3 and table 7)."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from lowrank_kv_jax.evals.studies.streaming.quality import ENDS, Score


@dataclasses.dataclass(frozen=True)
class Grid:
    """The paper's search range, in full 24 settings (its table 7 has twelve of them, it does not say which).

    Attributes:
        etas: step sizes, at prefill and while decoding alike.
        alphas: shares of the columns that move.
        iterations: n_iters, at prefill and while decoding alike.
        steps: s, tokens from one update to the next.
    """

    etas: tuple[float, ...] = (5e-5, 1e-5, 5e-6, 1e-6)
    alphas: tuple[float, ...] = (0.05, 0.1, 0.2)
    iterations: tuple[int, ...] = (2, 3)
    steps: tuple[int, ...] = (10,)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name):
                raise ValueError(f"{field.name}=(): give at least one value")


def printed_base(rank: float) -> str:
    """The form that the paper's grid is of."""
    return f"streamingkv:paper,rank={rank},rank_by=uniform,{ENDS}"


def grid_specs(base: str, grid: Grid) -> list[str]:
    """`base` at every point of the grid."""
    return [f"{base},eta={eta},eta_dec={eta},alpha={alpha},iterations={n},iterations_dec={n},step={step}"
            for eta, alpha, n, step in itertools.product(grid.etas, grid.alphas, grid.iterations, grid.steps)]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of one text over all settings of a form, nats a token.

    Attributes:
        spec: the form.
        mean, std: of the negative log-likelihood; the standard deviation is that of a sample, 0 for a single setting.
        least, most: gain over Palu at the worst and at the best setting.
        settings: how many there are.
    """

    spec: str
    text: str
    mean: float
    std: float
    least: float
    most: float
    settings: int


def spreads(rows: Mapping[str, Score], base: str, specs: Sequence[str], over: str) -> list[Spread]:
    """Spread of `specs`, settings of `base`, text by text; gains are over `over`."""
    out = []
    for text, static in rows[over].nll.items():
        nll = np.array([np.mean(rows[spec].nll[text]) for spec in specs])
        gains = np.mean(static) - nll
        out.append(Spread(base, text, float(nll.mean()), float(nll.std(ddof=1)) if len(nll) > 1 else 0.0,
                          float(gains.min()), float(gains.max()), len(nll)))
    return out
