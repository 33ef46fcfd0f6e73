"""What options take: a slip of the keys neither overflows nor runs for ever, and is told before a model is loaded."""

import argparse
import math
from typing import Any

from lowrank_kv_jax.checks.bounds import MOST, check_number, is_number

MOST_TIMES = 10**6
"""Of what is done so many times."""
MOST_SEED = 2**32 - 1

_TIMES = (
    "samples", "rounds", "steps", "windows", "test_windows", "calibrate_windows", "rows", "batch", "fewshot", "depths",
    "repeats", "bands", "layers", "refine", "requests", "asked", "prefixes", "slots", "admits",
    "queue", "turns", "refreshes",
)
_MOST = {
    **dict.fromkeys(_TIMES, MOST_TIMES), "seed": MOST_SEED, "thresholds": 100, "bandwidth": 1e18, "flops": 1e21,
    "port": 65535,
}
_LEAST = {
    **dict.fromkeys(("seed", "refine", "prefixes", "port", "queue", "after", "refreshes"), 0),
    **dict.fromkeys(("samples", "windows", "fewshot"), -math.inf),
}
"""Of integers, if not 1; where some commands take 0, each says so itself."""
_SHARES = ("latents", "rank", "ranks", "energy", "top_p")
_PATHS = ("json", "plot", "markdown", "out", "data", "folder", "bases", "model", "prompt_file", "squad", "hotpotqa",
          "corpus", "text", "calibrate", "haystack", "between", "test")


def check_bounds(args: argparse.Namespace) -> None:
    """Refuse numbers below the least, above the largest or not finite, and empty paths; of several each is looked at.

    Raises:
        ValueError: naming option, value and what is allowed.
    """
    for name, given in vars(args).items():
        for value in given if isinstance(given, list) else [given]:
            _check(name, f"--{name.replace('_', '-')} ", value)


def _check(name: str, option: str, value: Any) -> None:
    if name in _PATHS and value == "":
        raise ValueError(f"{option}'': must be a path that is not empty")
    if is_number(value):
        least = 0 if isinstance(value, float) else _LEAST.get(name, 1)
        check_number(option, value, least, _MOST.get(name, MOST), sign="")
    if isinstance(value, float) and name in _SHARES and not 0 < value <= 1:
        raise ValueError(f"{option}{value}: must lie in (0, 1], a share")
    if isinstance(value, float) and name == "ratios" and not value > 0:
        raise ValueError(f"{option}{value}: must be above 0")
