"""What eviction saves in time: decode steps, attention alone, and the bytes that the accountant predicts."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.evals.speed.timing import DecodeContender, alternate
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK, make_layout, prefill
from lowrank_kv_jax.method import Part, Place
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.saving.saved_cache import abstract_cache


def timed_specs(budget: int) -> list[str]:
    """The full cache, plain selection, and MomentKV without its moments and with those of each order."""
    momentkv = f"momentkv:budget={budget}"
    return ["full", f"snapkv:budget={budget}", momentkv,
            *(f"{momentkv},{part}" for part in ("mi=false,nc=false", "order=0", "order=gaussian"))]


@dataclasses.dataclass(frozen=True)
class Speed:
    """One method after one prompt, medians over rounds in which all methods alternate.

    Attributes:
        spec: the method.
        step_ms: of a decode step of the whole model, refreshes included.
        attention_ms: of attending with one query in every layer, the model left out.
        least_ms, attention_least_ms: the same of the fastest round.
        cache_bytes, predicted_bytes: of the leaves that exist, and as `eval_shape` foretells them.
    """

    spec: str
    step_ms: float
    attention_ms: float
    least_ms: float
    attention_least_ms: float
    cache_bytes: int
    predicted_bytes: int


def eviction_speed(
    model: Any, methods: Mapping[str, Part], length: int, *, steps: int = 2 * DEFAULT_BLOCK, rounds: int = 5,
    dtype: str = "float32", text: str | tuple[str, ...] = "pydoc", seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> list[Speed]:
    """Time decoding after a prompt of `length - steps` tokens, so that the context is `length` when it ends.

    Args:
        methods: by spec, none of them calibrated.
        steps: decode steps of a round; whole blocks, so that every method refreshes as often as it would for ever.
        dtype: of every method's cache.

    Raises:
        ValueError: a method that needs bases, steps that are no whole blocks, or more tokens than the model takes.
    """
    if calibrated := [spec for spec, method in methods.items() if method.calibrated]:
        raise ValueError(f"methods={calibrated}: need calibrated bases, and are not timed here")
    if steps < DEFAULT_BLOCK or steps % DEFAULT_BLOCK:
        raise ValueError(f"steps={steps}: must be a multiple of the block, {DEFAULT_BLOCK}")
    if not steps < length <= model.config.context:
        raise ValueError(f"length={length}: must lie in {steps + 1}..{model.config.context}")
    tokens = token_windows(model.tokenizer, load_corpus(text).texts, length - steps, 1, seed)
    layout = make_layout(model.config, 1, length - steps, length, DEFAULT_BLOCK, dtype)
    ready = {
        spec: prefill(method, model.config, model.params, jnp.asarray(tokens, jnp.int32), capacity=length,
                      block=DEFAULT_BLOCK, dtype=dtype)
        for spec, method in methods.items()
    }
    decoding = alternate({spec: DecodeContender(model, *found, steps) for spec, found in ready.items()}, steps, rounds,
                         on_round=on_round)
    attention = alternate({spec: AttentionContender(cache) for spec, (cache, _) in ready.items()},
                          AttentionContender.STEPS, rounds)
    return [
        Speed(spec, 1e3 / decoding[spec].decode_tokens_per_s, 1e3 / attention[spec].decode_tokens_per_s,
              *(1e3 * min(times[spec].decode) / times[spec].steps for times in (decoding, attention)),
              cache_bytes(ready[spec][0]).total, cache_bytes(abstract_cache(method, layout)).total)
        for spec, method in methods.items()
    ]


class AttentionContender:
    """Attention of one query after another over the caches of all layers, as a decode step reads them."""

    STEPS = 32

    def __init__(self, cache: Cache):
        spec = cache.layout.spec
        shape = (len(cache.groups), cache.layout.batch, 1, spec.q_heads, spec.head_dim)
        self._queries = jax.random.normal(jax.random.key(0), shape, jnp.float32)
        self._cache, self._attend = cache, jax.jit(_attend_everywhere)

    def round(self) -> tuple[float, float]:
        """Nothing, and the seconds of `STEPS` queries."""
        begin = time.perf_counter()
        q = self._queries
        for _ in range(self.STEPS):
            q = self._attend(self._cache, q)
        np.asarray(q[0, 0, 0, 0, 0])
        return 0.0, time.perf_counter() - begin


def _attend_everywhere(cache: Cache, queries: jax.Array) -> jax.Array:
    """Outputs of `queries` `[L, B, 1, N, D]` in each layer; normalised, so that they can be the next queries."""
    method, layout = cache.method, cache.layout
    bases = method.default_bases(layout.spec)
    positions = cache.length[:, None]
    outs = []
    for group, own, state, q in zip(method.layer_groups(layout.spec), bases, cache.groups, queries, strict=True):
        if len(group) != 1:
            raise ValueError(f"{method.name}: layers that share a cache are not timed alone")
        place = Place(window=layout.spec.windows[group[0]])
        out = machine_of(method).attend(layout, own, state, q, positions, place).out
        outs.append(out / (jnp.linalg.norm(out, axis=-1, keepdims=True) + 1e-6))
    return jnp.stack(outs)
