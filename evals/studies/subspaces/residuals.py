"""What the coded tokens of a prompt have lost, token by token."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.generation.forward import compress_group, make_layout


class Residuals(NamedTuple):
    """Squared norms of keys and values as they are coded, and of what their codes leave, float32 `[L, B, K, S]`.

    Slots behind a row's coded tokens hold zeros; slot 0 is the first token behind the sinks.
    """

    k_norm: np.ndarray
    v_norm: np.ndarray
    k_left: np.ndarray
    v_left: np.ndarray

    def energy_ratio(self, begin: int = 0, end: int | None = None) -> tuple[float, float]:
        """RER of keys and values of the coded tokens `begin` to `end`, mean over layers, rows and heads."""
        k_norm, v_norm, k_left, v_left = (x[..., begin:end].sum(-1) for x in self)
        ratios = (left / np.where(norm > 0, norm, 1) for norm, left in ((k_norm, k_left), (v_norm, v_left)))
        k, v = (float(np.mean(ratio)) for ratio in ratios)
        return k, v

    def relative(self) -> tuple[np.ndarray, np.ndarray]:
        """||x - x^|| / ||x|| of every token, `[L, B, K, S]`, NaN where there is none."""
        sides = ((self.k_norm, self.k_left), (self.v_norm, self.v_left))
        k, v = (np.sqrt(left / np.where(norm > 0, norm, np.nan)) for norm, left in sides)
        return k, v


def prompt_residuals(
    model: Any, method: Any, tokens: np.ndarray, bases: Any, dtype: Any = None, see: Callable[[Any], None] | None = None
) -> Residuals:
    """Residuals of prompts int32 `[B, S]` that a low-rank method has coded.

    Args:
        see: called with the store of each layer.

    Raises:
        ValueError: a method that does not code tokens in a basis.
    """
    if not method.rebuilds:
        raise ValueError(f"method {method.name!r} codes no tokens in a basis")
    layout = make_layout(model.config, *tokens.shape, tokens.shape[1], dtype=dtype)
    lengths = jnp.full((len(tokens),), tokens.shape[1], jnp.int32)
    layers = []
    for layer, taps in enumerate(iterate_taps(model.config, model.params, tokens)):
        own = None if bases is None else bases[layer]
        shape = layout.of_layer(layer)
        state = compress_group(method, shape, own, (taps,), lengths)
        if see is not None:
            see(state.store)
        layers.append([np.asarray(x) for x in _layer_residuals(method, shape, own, state.store, taps)])
    return Residuals(*(np.stack(x) for x in zip(*layers, strict=True)))


def residuals_by_part(
    model: Any, method: Any, tokens: np.ndarray, bases: Any, dtype: Any, parts: int
) -> dict[str, Any]:
    """RER of keys and of values of each of so many equal parts of a text, sinks apart, and the means over layers and rows
    of what the codec counts (`Codec.counted`)."""
    counts: dict[str, list[np.ndarray]] = {}

    def see(store: Any) -> None:
        for name, count in method.counted.items():
            counts.setdefault(name, []).append(np.asarray(count(store)))

    left = prompt_residuals(model, method, tokens, bases, dtype, see)
    edges = np.maximum(np.linspace(0, tokens.shape[1], parts + 1).astype(int) - method.sinks, 0)
    k, v = zip(*(left.energy_ratio(a, b) for a, b in zip(edges, edges[1:], strict=False)), strict=True)
    return {"rer_k": list(k), "rer_v": list(v)} | {name: float(np.mean(found)) for name, found in counts.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_residuals(method, layout, bases, store, taps):
    seen = method.rebuilt(layout, bases, store)
    norms, left = [], []
    for x, close in zip((taps.k_pre if method.rope == "pre" else taps.k, taps.v), seen, strict=True):
        x = x.swapaxes(1, 2).astype(jnp.float32)[:, :, method.sinks :]
        size = min(x.shape[2], close.shape[2])
        mask = jnp.arange(size) < store.tokens.length[:, None, None]
        x, close = x[:, :, :size], close[:, :, :size]
        norms.append(jnp.where(mask, jnp.sum(x**2, -1), 0.0))
        left.append(jnp.where(mask, jnp.sum((x - close) ** 2, -1), 0.0))
    return *norms, *left
