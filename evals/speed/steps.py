"""Whole programs on the device at hand, end to end: a prompt and decoded tokens of Llama 3.1 8B with random weights.

What weights hold decides nothing about speed; bases are those of white activations.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B
from lowrank_kv_jax.evals.speed.roofline import white_bases
from lowrank_kv_jax.generation.forward import prefill, refresh
from lowrank_kv_jax.generation.generate import decode
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork
from lowrank_kv_jax.method.layout import DEFAULT_BLOCK
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameters import params_of

METHODS = ("full", "static-pca-h:rank=0.5", "static-pca-h:rank=0.25", "palu:rank=0.5", "ojakv:rank=0.5", "kivi:bits=4",
           *(f"transform:bits={bits},rope=post,heads=per_head" for bits in (2, 4)), "transform:bits=2",
           *(f"transform:bits=2,rope=tile,heads={heads}" for heads in ("joint", "per_head")), "snapkv:budget=4096")
LAYERS, TOKENS, ROWS = 8, 32768, (1, 8)  # so few layers that all programs are compiled within minutes
BLOCKS = 6  # of as many tokens as a method asks for

_refresh = jax.jit(refresh, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Steps:
    """A method at some rows.

    Attributes:
        method: its spec.
        rows, tokens: of the batch, and of each row's prompt.
        prefill_s: seconds of the prompt of one row, median of two after the one that compiles.
        step_s: seconds of a decoded token of all rows, refreshes included, median of blocks.
        refresh_s: seconds of one refresh, of which a block of the cache's has one.
        bytes: of the cache.
        failure: why there are no times.
    """

    method: str
    rows: int
    tokens: int
    prefill_s: float | None = None
    step_s: float | None = None
    refresh_s: float | None = None
    bytes: int = 0
    failure: str | None = None


def bench_steps(
    methods: Mapping[str, Part], rows: Sequence[int] = ROWS, tokens: int = TOKENS, layers: int = LAYERS, *,
    base: ModelConfig = LLAMA_8B, workers: int = 4, seed: int = 0,
    on_method: Callable[[Steps], None] = lambda steps: None,
) -> list[Steps]:
    """Prefill and decode with every method: compiled side by side, in the buffers that are timed, then timed one by one.

    Args:
        methods: by spec.
        layers: of the model, all as the only one of `base`.
        workers: threads that compile.
        on_method: given what is done.
    """
    config = dataclasses.replace(base, num_layers=layers, windows=(None,) * layers)
    params = random_weights(config, jax.random.key(seed))
    prompt = jax.random.randint(jax.random.key(seed), (1, tokens), 0, config.vocab_size, jnp.int32)
    bases = {spec: white_bases(config.attention, method, jnp.bfloat16) for spec, method in methods.items()}
    found = []
    for count in rows:
        tried = functools.partial(_tried, config, params, prompt, count)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(functools.partial(tried, 1), methods, methods.values(), bases.values()))
        for spec, method in methods.items():
            found.append(tried(BLOCKS, spec, method, bases[spec]))
            on_method(found[-1])
    return found


def random_weights(config: ModelConfig, key: jax.Array) -> Any:
    """bfloat16, of the size that keeps activations what they are."""
    keys = iter(jax.random.split(key, 16 * config.num_layers + 16))
    draw = jax.jit(_draw, static_argnums=1)
    return params_of(config, lambda info: draw(next(keys), info.shape))


def _draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, jnp.bfloat16)
    return jax.random.normal(key, shape, jnp.bfloat16) * shape[0] ** -0.5


def _tried(config, params, prompt, rows: int, blocks: int, spec: str, method: Part, bases) -> Steps:
    about = Steps(spec, rows, prompt.shape[1])
    try:
        return _timed(about, config, params, prompt, method, bases, blocks)
    except Exception as reason:  # memory that does not suffice, a program that the compiler refuses
        return dataclasses.replace(about, failure=" ".join(str(reason).split())[:200] or type(reason).__name__)


def _timed(about: Steps, config, params, prompt, method: Part, bases, blocks: int) -> Steps:
    capacity = about.tokens + (BLOCKS + 1) * DEFAULT_BLOCK  # of every run alike: another one would be other programs
    taken = []
    for _ in range(1 if blocks == 1 else 2):
        begin = time.perf_counter()
        cache, logits = prefill(
            method, config, params, prompt, bases=bases, capacity=capacity, dtype=jnp.bfloat16)
        jax.block_until_ready((cache, logits))
        taken.append(time.perf_counter() - begin)
    if about.rows > 1:
        cache, logits = fork(cache, about.rows), jnp.repeat(logits, about.rows, axis=0)
    size = cache_bytes(cache).total
    block, seconds, refreshes = cache.layout.block, [], []
    _, cache, _ = next(decoded := decode(method, config, params, cache, logits, 1 + blocks * block, bases=bases))
    for _ in range(3):
        refreshes.append(_seconds(lambda: _refresh(method, cache, bases=bases)))
    for _ in range(blocks):
        seconds.append(_seconds(lambda: next(decoded)[0]))
    return dataclasses.replace(
        about, prefill_s=float(np.median(taken)), step_s=float(np.median(seconds[1:] or seconds)) / block,
        refresh_s=min(refreshes), bytes=size)


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def records(steps: Sequence[Steps], seed: int) -> list[dict[str, Any]]:
    """One record for each method and batch."""
    return [
        make_record(
            "bench kernels --sweep", model=f"{LAYERS} layers of Llama 3.1 8B, random weights", method=step.method,
            task="steps", length=step.tokens, samples=step.rows, seed=seed, cache_bytes=step.bytes,
            ttft_s=step.prefill_s, decode_tokens_per_s=None if step.step_s is None else step.rows / step.step_s,
            refresh_s=step.refresh_s, failure=step.failure,
        )
        for step in steps
    ]
