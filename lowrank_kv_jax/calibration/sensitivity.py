"""How much errors of cached keys and values raise a model's loss, channel by channel.

To second order an error d of a token's key or value moves the model's predictions by 1/2 sum_c F_c d_c^2 nats (of their
divergence), F the Fisher information of its channels: the mean square of the gradient of -log p(y) by them, with next
tokens y drawn from the model itself. That one number weighs channels, heads and layers, keys and values against each
other, with all that comes after: softmax, output projection, later layers. (True next tokens gave worse weights.)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.calibration.backward import (
    causal_logits,
    layer_output,
    loss_gradient,
    mixed,
    residual_streams,
    sampled_targets,
    softmax,
)
from lowrank_kv_jax.calibration.taps import spread
from lowrank_kv_jax.estimators.moments import Sensitivity
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage.sharding import to_host

LENGTH = 1024
"""Tokens of a text."""
TEXTS = 8
"""Most texts that are read; they are taken evenly from the calibration's."""
SINKS, RECENT = 4, 32
"""What a cache keeps exact: such keys, and what queries so near see of a key, cost nothing."""


def text_length(window: int) -> int:
    """Tokens of a text, of windows of so many. Raises ValueError where none of them would count."""
    length = min(LENGTH, window)
    if length <= SINKS + RECENT:
        raise ValueError(f"length={length}: must be at least {SINKS + RECENT + 1}, as the first {SINKS} and last "
                         f"{RECENT} tokens of a window are not counted")
    return length


def collect_sensitivity(model: Any, tokens: np.ndarray, progress: bool = False) -> Sensitivity:
    """Mean squares of the loss' gradients by keys and values that are seen from afar.

    Args:
        model: a `LoadedModel`.
        tokens: int32 `[n, S]`; a text is `LENGTH` of them, or a window.
        progress: show a progress bar.

    Raises:
        ValueError: windows of exact tokens alone, or gradients that are not finite (layer named).
    """
    config = model.config
    length = text_length(tokens.shape[1])
    texts = spread(tokens, length, TEXTS)
    total: dict[str, Any] = {}
    with ProgressBar("sensitivity", len(texts), progress) as bar:
        for index, text in enumerate(texts):
            for name, found in _squares_of(config, model.params, jnp.asarray(text[None]), index).items():
                finite = np.isfinite(found).all(axis=(1, 2))
                if not finite.all():
                    raise ValueError(f"sensitivity: the gradient by {name} of layer {int(np.argmin(finite))} is not "
                                     "finite")
                total[name] = total.get(name, 0.0) + found / len(texts)
            bar.advance()
    return Sensitivity(**total)


def _squares_of(config: ModelConfig, params: Any, tokens: jax.Array, seed: int) -> dict[str, np.ndarray]:
    """Float64 `[L, K, D]` by tap."""
    streams = residual_streams(config, params, tokens)
    last = streams.pop()
    cotangent = loss_gradient(config, params, last, sampled_targets(config, params, last, jax.random.key(seed)))
    layers = []
    for own, window, layer in zip(config.by_layer[::-1], config.windows[::-1], params["layers"][::-1], strict=True):
        cotangent, squares = _backward(own, window, layer, streams.pop(), cotangent)
        layers.append({name: to_host(x).astype(np.float64) for name, x in squares.items()})
    return {name: np.stack([layer[name] for layer in layers[::-1]]) for name in layers[0]}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(config: ModelConfig, window: int | None, layer: Any, x: jax.Array, cotangent: jax.Array):
    """Gradient by the layer's input, and mean squares `[K, D]` of those by its tokens, seen from afar."""
    spec, (batch, length, _) = config.attention, x.shape
    zeros = jnp.zeros((batch, length, spec.kv_heads, spec.head_dim), x.dtype)

    def through(x, k_error, v_error):
        attend = functools.partial(_attend_with_errors, config, window, k_error, v_error)
        return jnp.vdot(layer_output(config, layer, x, attend), cotangent)

    by_x, by_k, by_v = jax.grad(through, argnums=(0, 1, 2))(x, zeros, zeros)
    taps = {"k": by_k, "k_pre": by_k, "v": by_v}
    if spec.rope is not None:
        cos, sin = rope_angles(spec.rope, jnp.arange(length, dtype=jnp.int32)[:, None])
        taps["k_pre"] = rotate(by_k, cos, -sin)
    counted = slice(SINKS, length - RECENT)
    return by_x, {name: jnp.mean(jnp.square(g[:, counted].astype(jnp.float32)), axis=(0, 1)) for name, g in taps.items()}


def _attend_with_errors(
    config: ModelConfig, window: int | None, k_error, v_error, q, k, v, sink_logits=None
) -> jax.Array:
    """Attention in which queries at least `RECENT` tokens behind a token see its key and value with these errors."""
    index = jnp.arange(q.shape[1])
    far = (index[:, None] - index >= RECENT) & (index >= SINKS)
    logits = jnp.where(far, causal_logits(config, window, q, k + k_error), causal_logits(config, window, q, k))
    probabilities = softmax(logits, sink_logits)
    return mixed(probabilities, v) + mixed(jnp.where(far, probabilities, 0), v_error)
