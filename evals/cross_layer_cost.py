"""What a cross-layer basis costs: from which length on it pays, the fit, the rebuild at decode."""

import collections
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.accounting import full_cache_bytes
from lowrank_kv_jax.cache import bases_of_group
from lowrank_kv_jax.evals.timing import CacheContender, alternate
from lowrank_kv_jax.forward import DEFAULT_BLOCK
from lowrank_kv_jax.method import KVMethod, Layout
from lowrank_kv_jax.parse import parse_method
from lowrank_kv_jax.rank_for_bytes import state_bytes
from lowrank_kv_jax.spec import AttentionSpec

LONGEST = 1 << 17


def bytes_at(method: KVMethod, spec: AttentionSpec, prompt: int, dtype: str = "bfloat16") -> int:
    """Bytes of the cache of a prompt and one block of new tokens, all leaves counted."""
    layout = Layout(spec, 1, prompt, prompt + DEFAULT_BLOCK, DEFAULT_BLOCK, dtype)
    groups = collections.Counter(bases_of_group(method, spec, None))  # groups of one shape weigh the same
    shapes = {group: jax.eval_shape(functools.partial(method.init, layout, group)) for group in groups}
    return sum(state_bytes(shapes[group]) * count for group, count in groups.items())


def smaller_at(method: KVMethod, spec: AttentionSpec, prompt: int, dtype: str = "bfloat16") -> float:
    """How many times smaller than a 16-bit full cache of the same tokens that is."""
    return full_cache_bytes(spec, prompt + DEFAULT_BLOCK) / bytes_at(method, spec, prompt, dtype)


def break_even(
    method: KVMethod, spec: AttentionSpec, ratio: float = 1.0, dtype: str = "bfloat16"
) -> int | None:
    """The shortest prompt whose cache is `ratio` times smaller; None if none of up to 131,072 tokens is.

    Bases do not grow with the prompt, so that they dominate below this length. Not for methods whose rank
    follows the length (`smaller`).
    """
    if smaller_at(method, spec, LONGEST, dtype) < ratio:
        return None
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if smaller_at(method, spec, middle, dtype) >= ratio else (middle, high)
    return high


@dataclasses.dataclass(frozen=True)
class FitCost:
    """Seconds to the first token, medians over alternating rounds: full cache, and with the method's fit."""

    full: float
    method: float

    @property
    def overhead(self) -> float:
        """Share of the prefill that the compression adds."""
        return self.method / self.full - 1


def fit_cost(model: Any, method: KVMethod, length: int, rounds: int = 3, seed: int = 0) -> FitCost:
    """Time prefill with and without the method on random tokens of `length`."""
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, length))
    contenders = {
        name: CacheContender(model, m, None, tokens, 1)
        for name, m in (("full", parse_method("full")), ("method", method))
    }
    timings = alternate(contenders, 1, rounds)
    return FitCost(timings["full"].ttft_s, timings["method"].ttft_s)


@dataclasses.dataclass(frozen=True)
class DecodeCost:
    """Seconds a decoded token takes, and where they must go.

    Attributes:
        measured: through the method's cache.
        full: through the full cache.
        layers: through a cache of a few tokens: the layers without attention.
        flops: of the attention, rebuilding keys included, of one token through all layers.
        bytes: of the cache.
        matmul_rate, copy_rate: measured on this machine, FLOP/s and bytes/s.
    """

    measured: float
    full: float
    layers: float
    flops: float
    bytes: int
    matmul_rate: float
    copy_rate: float

    @property
    def floor(self) -> float:
        """No less is possible: the larger of compute and traffic, and the layers without attention."""
        return max(self.flops / self.matmul_rate, self.bytes / self.copy_rate) + self.layers


def attention_flops(spec: AttentionSpec, tokens: int, rank_k: int, rank_v: int) -> float:
    """FLOPs of one query through all layers over coefficients in bases shared by a layer's heads.

    A token and layer: 2 R_k K D to rebuild its keys, 2 N D for logits, 2 N R_v for values.
    """
    width = spec.kv_heads * spec.head_dim
    per_token = rank_k * width + spec.q_heads * (spec.head_dim + rank_v)
    return 2.0 * spec.num_layers * tokens * per_token


def decode_cost(
    model: Any, method: KVMethod, ranks: tuple[int, int], length: int, steps: int = 16, rounds: int = 3
) -> DecodeCost:
    """Time decoding after a prompt of random tokens, the full cache and a nearly empty one beside it."""
    config = model.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))
    full, none = parse_method("full"), parse_method("sliding-window:budget=1,keep=none")
    contenders = {
        name: CacheContender(model, m, None, tokens, steps)
        for name, m in (("measured", method), ("full", full), ("layers", none))
    }
    seconds = {name: 1 / t.decode_tokens_per_s for name, t in alternate(contenders, steps, rounds).items()}
    return DecodeCost(
        **seconds,
        flops=attention_flops(config.attention, length, *ranks),
        bytes=bytes_at(method, config.attention, length),
        matmul_rate=matmul_rate(),
        copy_rate=copy_rate(),
    )


def matmul_rate(size: int = 1536) -> float:
    """FLOP/s of a large float32 product, the best of a few."""
    x = jnp.ones((size, size), jnp.float32)
    return 2.0 * size**3 / _best(jax.jit(lambda x: x @ x), x)


def copy_rate(size: int = 1 << 26) -> float:
    """Bytes/s that are read while an array is copied, the best of a few."""
    x = jnp.ones((size,), jnp.float32)
    return 4.0 * size / _best(jax.jit(lambda x: x + 1), x)


def _best(f, x, tries: int = 5) -> float:
    jax.block_until_ready(f(x))
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        jax.block_until_ready(f(x))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
