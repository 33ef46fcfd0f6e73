"""What a cross-layer basis costs: from which length on it pays, the fit, the rebuild at decode."""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.evals.speed.machine_rates import rate_contenders, rates
from lowrank_kv_jax.evals.speed.timing import CacheContender, alternate
from lowrank_kv_jax.method import Layout, Part
from lowrank_kv_jax.method.accounting import full_cache_bytes, state_bytes
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype

LONGEST = 1 << 17
STEPS = 16
"""Decode steps of a timed round."""
FULL, LAYERS = "full cache", "layers alone"


def bytes_at(method: Part, spec: AttentionSpec, prompt: int, dtype: str | None = None) -> int:
    """Bytes of the cache of a prompt and one block of new tokens, all leaves counted."""
    layout = _layout(method, spec, prompt, dtype or default_cache_dtype())
    groups = collections.Counter(bases_of_group(method, spec, None))  # groups of one shape weigh the same
    shapes = {group: jax.eval_shape(functools.partial(machine_of(method).init, layout, group)) for group in groups}
    return sum(state_bytes(shapes[group]) * count for group, count in groups.items())


def _layout(method: Part, spec: AttentionSpec, prompt: int, dtype: str) -> Layout:
    return Layout(spec, 1, prompt, prompt + method.default_block, method.default_block, dtype)


def smaller_at(method: Part, spec: AttentionSpec, prompt: int, dtype: str | None = None) -> float:
    """How many times smaller than a 16-bit full cache of the same tokens that is."""
    return full_cache_bytes(spec, prompt + method.default_block) / bytes_at(method, spec, prompt, dtype)


def break_even(method: Part, spec: AttentionSpec, ratio: float = 1.0, dtype: str | None = None) -> int | None:
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
class Cost:
    """What a method's prompt takes, and each token decoded after it, in seconds: medians over alternating rounds.

    Attributes:
        ttft, full_ttft: to the first token, with the method's fit and with a full cache.
        decode, full_decode: of a token through either cache.
        layers: of a token through a cache of a few tokens: the layers without attention.
        flops: of the attention, rebuilding keys included, of one token through all layers.
        bytes: of the cache.
        matmul_rate, copy_rate: of this machine, measured in the same rounds, FLOP/s and bytes/s.
    """

    ttft: float
    full_ttft: float
    decode: float
    full_decode: float
    layers: float
    flops: float
    bytes: int
    matmul_rate: float
    copy_rate: float

    @property
    def overhead(self) -> float:
        """Share of the prefill that the compression adds."""
        return self.ttft / self.full_ttft - 1

    @property
    def floor(self) -> float:
        """Decoding takes no less: the larger of compute and traffic, and the layers without attention."""
        return max(self.flops / self.matmul_rate, self.bytes / self.copy_rate) + self.layers


def attention_flops(spec: AttentionSpec, tokens: int, rank_k: float, rank_v: float) -> float:
    """FLOPs of one query through all layers over coefficients in bases shared by a layer's heads.

    A token and layer: 2 R_k K D to rebuild its keys, 2 N D for logits, 2 N R_v for values.
    """
    width = spec.kv_heads * spec.head_dim
    per_token = rank_k * width + spec.q_heads * (spec.head_dim + rank_v)
    return 2.0 * spec.num_layers * tokens * per_token


def timed_dtype() -> str:
    """Of caches that are timed: float32 on a CPU, whose bfloat16 products are slow, else the library's."""
    return "float32" if jax.default_backend() == "cpu" else default_cache_dtype()


def ranks_of(
    methods: Mapping[str, Part], spec: AttentionSpec, length: int, dtype: str | None = None
) -> dict[str, tuple[float, float]]:
    """Of each method `mean_ranks` in a cache of `dtype`, by default `timed_dtype`: what `measure_costs` can measure.

    Raises:
        ValueError: a method whose cache holds no bases of keys and values, by its spec.
    """
    ranks = {}
    for name, method in methods.items():
        try:
            ranks[name] = mean_ranks(method, spec, length, dtype or timed_dtype())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return ranks


def mean_ranks(method: Part, spec: AttentionSpec, length: int, dtype: str) -> tuple[float, float]:
    """Ranks of keys and values of a method that fits bases to its prompt, means over the groups.

    Raises:
        ValueError: another method, a prompt so short that nothing is coded, or a model that caches latents.
    """
    layout, machine = _layout(method, spec, length, dtype), machine_of(method)
    if spec.latent is not None:
        raise ValueError("this model caches latents (MLA); costs are of bases of keys and values")
    if machine.calibrated:
        raise ValueError("reads calibrated bases; costs are of methods that fit bases to the prompt, such as xkv:group=2")
    ranks = []
    for group in machine.default_bases(spec):
        store = jax.eval_shape(functools.partial(machine.init, layout, group)).store
        bases = [getattr(store, f"{side}_basis", None) for side in "kv"]
        if any(basis is None for basis in bases):
            raise ValueError(f"stores no bases of keys and values with {length} tokens of this model; costs are of "
                             "methods that fit bases to the prompt, such as xkv:group=2")
        ranks.append([basis.shape[-1] for basis in bases])
    k, v = np.mean(ranks, axis=0)
    return float(k), float(v)


def tokens_attended(method: Part, length: int) -> int:
    """Tokens of the prompt that a step attends to: all, or where only some blocks are rebuilt about so many."""
    rebuild = getattr(method, "rebuild", None)
    return length if rebuild is None else round(rebuild * length) if isinstance(rebuild, float) else min(rebuild, length)


def measure_costs(
    model: Any, methods: Mapping[str, Part], length: int, steps: int = STEPS, rounds: int = 3,
    dtype: str | None = None,
) -> dict[str, Cost]:
    """Time prefill and decoding of cross-layer methods on random tokens, the full cache beside them.

    Args:
        dtype: of the caches, by default `timed_dtype`.

    Raises:
        ValueError: as `ranks_of`, before anything is timed.
    """
    config, dtype = model.config, dtype or timed_dtype()
    ranks = ranks_of(methods, config.attention, length, dtype)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))
    contenders = {
        name: CacheContender(model, m, None, tokens, steps, dtype=dtype)
        for name, m in {**methods, FULL: parse_method("full")}.items()
    }
    layers = parse_method("sliding-window:budget=1,keep=none")
    contenders[LAYERS] = CacheContender(model, layers, None, tokens[:, :32], steps, dtype=dtype)
    times = alternate(contenders | rate_contenders(), steps, rounds)
    return {
        name: Cost(
            times[name].ttft_s, times[FULL].ttft_s,
            *(1 / times[which].decode_tokens_per_s for which in (name, FULL, LAYERS)),
            attention_flops(config.attention, tokens_attended(method, length), *ranks[name]),
            bytes_at(method, config.attention, length, dtype), *rates(times),
        )
        for name, method in methods.items()
    }
