"""Time to first token and decode speed: contenders alternate, round by round, and medians are compared."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.generation.generate import decode
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache, fork


class Contender(Protocol):
    """Something that can prefill a prompt and decode after it."""

    def round(self) -> tuple[float, float]:
        """Seconds to the first token, and seconds of the decode steps that follow."""
        ...


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of each round.

    Attributes:
        first: to the first token.
        decode: of all `steps` decode steps.
        steps: decode steps a round, times the rows of the batch.
    """

    first: tuple[float, ...]
    decode: tuple[float, ...]
    steps: int

    @property
    def ttft_s(self) -> float:
        return float(np.median(self.first))

    @property
    def decode_tokens_per_s(self) -> float:
        return self.steps / float(np.median(self.decode))


class CacheContender:
    """A method of this library: the prefill of `forward.prefill`, the decode loop of `generate`."""

    def __init__(
        self, model: Any, method: Part, bases: Any, tokens: np.ndarray, steps: int, *,
        block: int | None = None, dtype: Any = None, chunk: int | None = None,
    ):
        self._model, self._method, self._bases = model, method, bases
        self._tokens, self._steps = jnp.asarray(tokens, jnp.int32), steps
        self._options = {"capacity": tokens.shape[1] + steps, "block": block, "dtype": dtype, "chunk": chunk}

    def round(self) -> tuple[float, float]:
        config, params = self._model.config, self._model.params
        begin = time.perf_counter()
        cache, logits = prefill(
            self._method, config, params, self._tokens, bases=self._bases, **self._options
        )
        blocks = decode(self._method, config, params, cache, logits, 1 + self._steps, bases=self._bases)
        del cache, logits
        next(blocks)
        first = time.perf_counter()
        for _ in blocks:
            pass
        return first - begin, time.perf_counter() - first


class DecodeContender:
    """The decode loop of `generate` on a copy of one prefilled cache."""

    def __init__(self, model: Any, cache: Cache, logits: jax.Array, steps: int, bases: Any = None):
        self._model, self._cache, self._logits, self._steps, self._bases = model, cache, logits, steps, bases

    def round(self) -> tuple[float, float]:
        """Nothing, and the seconds of the decode steps, refreshes included."""
        cache = jax.block_until_ready(fork(self._cache))
        config, params = self._model.config, self._model.params
        blocks = decode(cache.method, config, params, cache, self._logits, 1 + self._steps, bases=self._bases)
        del cache
        next(blocks)  # the first token is the prefill's
        begin = time.perf_counter()
        for _ in blocks:
            pass
        return 0.0, time.perf_counter() - begin


def alternate(
    contenders: Mapping[str, Contender], steps: int, rounds: int, warmup: bool = True,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time every contender once a round, so that what else the machine does hits all of them alike.

    Args:
        steps: tokens that a contender decodes in a round, over all rows.
        rounds: that are timed.
        warmup: run one more round before, which compiles and is not counted.
        on_round: called after each contender's turn.
    """
    first: dict[str, list[float]] = {name: [] for name in contenders}
    after: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + warmup):
        for name, contender in contenders.items():
            seconds = contender.round()
            if number >= warmup:
                first[name].append(seconds[0])
                after[name].append(seconds[1])
            on_round()
    return {name: Timing(tuple(first[name]), tuple(after[name]), steps) for name in contenders}
