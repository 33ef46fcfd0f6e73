"""How well moments of many evicted tokens hold in 16 bits."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.calibration.taps import iterate_taps
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.summaries import moments as moment_summary

QUERIES = 32


@dataclasses.dataclass(frozen=True)
class PrecisionError:
    """Of moments in `dtype` after so many evictions, against float32; means over layers, heads and queries.

    Attributes:
        order: of the moments.
        lse: |log Z^ - log Z^_32|.
        output: ||f^ - f^_32|| / ||f^_32||.
    """

    dtype: str
    order: str
    evictions: int
    lse: float
    output: float


def check_window(length: int) -> None:
    """Raise ValueError for a text of which no block can be evicted."""
    if length < DEFAULT_BLOCK:
        raise ValueError(f"length={length}: must be at least {DEFAULT_BLOCK} for the study precision, which evicts so "
                         "many tokens at a time")


def precision_errors(
    model: Any, windows: np.ndarray, evictions: Sequence[int], dtypes: Sequence[str] = ("bfloat16", "float16", "int16"),
    order: str = "gaussian", progress: bool = False,
) -> list[PrecisionError]:
    """Evict the tokens of texts, one after the other and a block at a time, from every layer.

    Args:
        windows: int32 `[n, S]`, evicted again from the first where they are too few; the last `QUERIES` tokens of each
            one that is measured behind attend to what was evicted.
        evictions: when to measure; in whole windows, the next one that is not before.
        order: of the moments, see `summaries.moments.ORDERS`.

    Raises:
        ValueError: windows of less than a block.
    """
    check_window(windows.shape[1])
    config, length = model.config, windows.shape[1] // DEFAULT_BLOCK * DEFAULT_BLOCK
    due = sorted({-(-count // length) for count in evictions})
    read = windows[: due[-1], :length]
    errors: dict[tuple[int, str], list[tuple[float, float]]] = {(number, dtype): [] for number in due for dtype in dtypes}
    with ProgressBar("evicting", due[-1] * config.num_layers, progress) as bar:
        for taps in iterate_taps(config, model.params, read):
            held: dict[str, moment_summary.EvictedMoments] = {
                dtype: moment_summary.empty_moments(1, config.kv_heads, config.head_dim, order, jnp.dtype(dtype))
                for dtype in ("float32", *dtypes)}
            for number in range(1, due[-1] + 1):
                at = (number - 1) % len(read)
                q, k, v = (x[at : at + 1] for x in (taps.q, taps.k, taps.v))
                held = {dtype: _evict(own, k, v) for dtype, own in held.items()}
                bar.advance()
                if number in due:
                    parts = {dtype: _partial(own, q[:, -QUERIES:], config.attention.scale) for dtype, own in held.items()}
                    for dtype in dtypes:
                        errors[number, dtype].append(_between(parts[dtype], parts["float32"]))
    return [PrecisionError(dtype, order, number * length, *map(float, np.mean(own, axis=0)))
            for (number, dtype), own in errors.items()]


@jax.jit
def _evict(moments: moment_summary.EvictedMoments, k: jax.Array, v: jax.Array) -> moment_summary.EvictedMoments:
    """Keys and values `[1, S, K, D]`, a block at a time."""
    def blocks(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2).reshape(1, x.shape[2], -1, DEFAULT_BLOCK, x.shape[3]).transpose(2, 0, 1, 3, 4)

    def step(own, block):
        return moment_summary.update(own, *block, jnp.ones(block[0].shape[:3], jnp.float32)), None

    return jax.lax.scan(step, moments, (blocks(k), blocks(v)))[0]


@functools.partial(jax.jit, static_argnums=2)
def _partial(moments: moment_summary.EvictedMoments, q: jax.Array, scale: float) -> AttnPartial:
    return moment_summary.partial(moments, q, scale)


def _between(part: AttnPartial, exact: AttnPartial) -> tuple[float, float]:
    lse = jnp.mean(jnp.abs(part.lse - exact.lse))
    off = jnp.linalg.norm(part.out - exact.out, axis=-1) / jnp.linalg.norm(exact.out, axis=-1)
    return float(lse), float(jnp.mean(off))
