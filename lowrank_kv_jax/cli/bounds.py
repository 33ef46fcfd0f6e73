"""The largest numbers that options take, so that a slip of the keys neither overflows nor runs for ever."""

import argparse
import math

MOST = 2**28
"""Tokens, sizes: sums of several stay within 32 bits."""
MOST_TIMES = 10**6
"""Of what is done so many times."""
MOST_SEED = 2**32 - 1

_TIMES = frozenset({
    "samples", "rounds", "steps", "windows", "test_windows", "calibrate_windows", "rows", "batch", "fewshot", "depths",
    "repeats", "bands", "layers",
})


def check_bounds(args: argparse.Namespace) -> None:
    """Refuse numbers above the largest, and those that are not finite; of several values each is looked at.

    Raises:
        ValueError: naming option, value and what is allowed.
    """
    for name, given in vars(args).items():
        most = MOST_SEED if name == "seed" else MOST_TIMES if name in _TIMES else MOST
        option = f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{option} {value}: must be a finite number")
            if isinstance(value, int) and value > most:
                raise ValueError(f"{option} {value}: must be at most {most}")
