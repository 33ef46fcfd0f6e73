"""What this machine does at most: FLOP/s of a large product and bytes/s of a pass over memory.

As contenders they take their turns among what is timed beside them, so that floors are medians of the same minutes.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.evals.speed.timing import Contender, Timing

PRODUCT, COPY = "large product", "copy in place"
SIDE = 1536  # of the factors: as fast as any larger on the CPUs tried, and not much of a round
NUMBERS = 1 << 26  # of a pass, beyond any cache
TIMES = 12


class _Repeated:
    """A step, some times in a row."""

    def __init__(self, step: Callable[[Any], Any], start: Any):
        self._step, self._held = step, start

    def round(self) -> tuple[float, float]:
        """Nothing, and the seconds of all steps."""
        begin = time.perf_counter()
        for _ in range(TIMES):
            self._held = jax.block_until_ready(self._step(self._held))
        return 0.0, time.perf_counter() - begin


def rate_contenders() -> dict[str, Contender]:
    """A float32 product, and a pass over a large array in place: fresh memory would cost its first touch too."""
    mean = jnp.full((SIDE, SIDE), 1 / SIDE)  # which keeps numbers the size that they are
    product = jax.jit(lambda x: mean @ x)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    return {PRODUCT: _Repeated(product, mean), COPY: _Repeated(copy, jnp.ones((NUMBERS,), jnp.float32))}


def rates(times: Mapping[str, Timing]) -> tuple[float, float]:
    """FLOP/s of products and bytes/s, read and written, of a copy, from the medians of their rounds."""
    product, copy = (times[name].decode_tokens_per_s / times[name].steps * TIMES for name in (PRODUCT, COPY))
    return 2.0 * SIDE**3 * product, 8.0 * NUMBERS * copy
