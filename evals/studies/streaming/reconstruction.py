"""What latents give back of keys and values, layer by layer (StreamingKV, figures 1, 5, 7 and 8), and equation 15 on
hidden states, as it stands."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.estimators.gha_tail import update_tail
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.generation.forward import compress_group, make_layout
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.progress import ProgressBar


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """What the latents of one prompt give back of all of its tokens.

    Attributes:
        cosine: of a token's original and rebuilt channels, all heads side by side, mean over tokens.
        explained: 1 - ||X - X^||^2 / ||X - mean X||^2, the explained variance.
        lost: ||X - X^||^2 / ||X||^2.
    """

    spec: str
    text: str
    layer: int
    side: str
    cosine: float
    explained: float
    lost: float


def reconstruction(
    model: Any, methods: Mapping[str, Part], bases: Mapping[str, Any], texts: Mapping[str, np.ndarray],
    progress: bool = False,
) -> list[Rebuilt]:
    """Compress prompts and rebuild every token with what the methods have learned of it by the end of the prompt.

    Args:
        methods: by spec, low-rank.
        bases: by spec, of those that are calibrated.
        texts: int32 tokens `[n, S]` by name; rows are averaged.

    Raises:
        ValueError: a method without coefficients in bases.
    """
    for spec, method in methods.items():
        if not (method.rebuilds and method.per_token):
            raise ValueError(f"{spec}: codes no tokens in one basis of a layer")
    own = {spec: bases.get(spec) or method.default_bases(model.config.attention) for spec, method in methods.items()}
    found: dict[tuple[str, str, int, str], list[np.ndarray]] = {}
    steps = sum(len(tokens) for tokens in texts.values()) * model.config.num_layers
    with ProgressBar("rebuilding", steps, progress) as bar:
        for text, tokens in texts.items():
            layout = make_layout(model.config, 1, tokens.shape[1], tokens.shape[1], dtype=jnp.float32)
            for window in tokens:
                for layer, taps in enumerate(iterate_taps(model.config, model.params, window[None])):
                    for spec, method in methods.items():
                        measured = _measure(method, layout.of_layer(layer), own[spec][layer], taps)
                        for side, values in zip(("k", "v"), np.asarray(measured), strict=True):
                            found.setdefault((spec, text, layer, side), []).append(values)
                    bar.advance()
    return [Rebuilt(*key, *map(float, np.mean(values, axis=0))) for key, values in found.items()]


def _measure(method, layout, bases, taps) -> jax.Array:
    state = compress_group(method, layout, bases, (taps,), jnp.full((1,), layout.prompt, jnp.int32))
    return _compare(method, layout.spec, bases, state.store, taps)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare(method, spec, bases, store, taps) -> jax.Array:
    """Cosine, explained variance and lost energy of keys and values, `[2, 3]`."""
    exact = (taps.k_pre if method.rope == "pre" else taps.k, taps.v)
    frame, out = method.frame(spec, bases, store), []
    codes = frame.code(*(x.astype(jnp.float32) for x in exact))
    for side, x, code in zip(("k", "v"), exact, codes, strict=True):
        close = frame.rebuild(side, code, spec.kv_heads)[0].swapaxes(0, 1).reshape(x.shape[1], -1)
        x = x[0].reshape(close.shape).astype(jnp.float32)
        norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(close, axis=-1)
        cosine = jnp.mean(jnp.sum(x * close, axis=-1) / jnp.maximum(norms, 1e-30))
        lost, energy = jnp.sum((x - close) ** 2), jnp.sum(x**2)
        out.append(jnp.stack([cosine, 1 - lost / jnp.sum((x - x.mean(0)) ** 2), lost / energy]))
    return jnp.stack(out)


def means(rows: Sequence[Rebuilt]) -> list[Rebuilt]:
    """Means over the layers; `layer` is -1."""
    grouped: dict[tuple[str, str, str], list[Rebuilt]] = {}
    for row in rows:
        grouped.setdefault((row.spec, row.text, row.side), []).append(row)
    return [
        Rebuilt(spec, text, -1, side, *(float(np.mean([getattr(row, field) for row in same]))
                                        for field in ("cosine", "explained", "lost")))
        for (spec, text, side), same in grouped.items()
    ]


_update = jax.jit(update_tail, static_argnames=("eta", "iterations", "scale", "frozen_outputs"))


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Equation 15 on hidden states x `[H]`, as printed for A `[H, R]`: means over layers of the lost energy.

    Attributes:
        scale: what a step is divided by, see `update_tail`.
        lost: with the encoder updated and the decoder left alone; None where it diverged in some layer.
    """

    side: str
    scale: str
    eta: float
    lost: float | None


def hidden_updates(
    model: Any, moments: Moments, tokens: np.ndarray, rank: float = 0.5, alpha: float = 0.2, iterations: int = 3,
    steps: Sequence[tuple[str, float]] = (("sum", 0.0), ("sum", 1e-6), ("sum", 1e-5), ("bound", 0.01), ("bound", 0.1)),
) -> list[Hidden]:
    """The paper's encoder update in the space of equation 15: A = W V Sigma^-1/2, of which the last columns move, and
    B = Sigma^1/2 V^T, which stays; one prompt, all heads of a layer together.

    Args:
        moments: of the calibration.
        tokens: int32 `[S]`.
    """
    found: dict[tuple[str, str, float], list[float]] = {}
    for layer, taps in enumerate(iterate_taps(model.config, model.params, np.asarray(tokens)[None])):
        x = taps.x[0].astype(jnp.float32)
        for side, tap in (("k", "k_pre"), ("v", "v")):
            values, vectors = np.linalg.eigh(np.asarray(getattr(moments, tap)[layer]) / moments.tokens)
            kept = round(rank * len(values))
            v = jnp.asarray(vectors[:, ::-1][:, :kept], jnp.float32)
            root = jnp.asarray(np.maximum(values[::-1][:kept], 1e-12) ** 0.25, jnp.float32)
            kernel = model.params["layers"][layer]["attention"][f"{side}_proj"]["kernel"].astype(jnp.float32)
            y, moving = x @ kernel, max(1, int(alpha * kept))
            encoder = kernel @ v / root
            for scale, eta in steps:
                tail = _update(encoder[:, :-moving], encoder[:, -moving:], x, None, eta, iterations=iterations,
                               scale=scale, frozen_outputs=True)
                rebuilt = x @ jnp.concatenate([encoder[:, :-moving], tail], axis=1) @ (v * root).T
                found.setdefault((side, scale, eta), []).append(float(jnp.sum((y - rebuilt) ** 2) / jnp.sum(y**2)))
    return [Hidden(*key, float(np.mean(lost)) if np.isfinite(lost).all() else None) for key, lost in found.items()]
