"""What latents give back of keys and values, layer by layer (StreamingKV, figure 5a), and equation 15 on
hidden states, as it stands."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.calibration.fisher import PROJECTIONS, check_projections
from lowrank_kv_jax.estimators.gha_tail import update_tail
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.evals.studies.streaming.learned_layers import SIDES, of_sides
from lowrank_kv_jax.method import Part


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

    Args, raises: as of `of_sides`; rows of a text are averaged.
    """
    found = of_sides(model, methods, bases, texts, _compare, progress)
    return [Rebuilt(*key, *map(float, np.mean(values, axis=0))) for key, values in found.items()]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare(method, spec, bases, store, tokens) -> jax.Array:
    """Cosine, explained variance and lost energy of keys and values, `[2, 3]`."""
    out = []
    for x, close in rebuilt_tokens(method, spec, bases, store, tokens):
        lost, energy = jnp.sum((x - close) ** 2), jnp.sum(x**2)
        out.append(jnp.stack([jnp.mean(cosines(x, close)), 1 - lost / jnp.sum((x - x.mean(0)) ** 2), lost / energy]))
    return jnp.stack(out)


def rebuilt_tokens(method, spec, bases, store, tokens) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values of a prompt and what is rebuilt of them, float32 `[S, K D]` each."""
    frame, out = method.frame(spec, bases, store), []
    codes = frame.code(*(x.astype(jnp.float32) for x in tokens))
    for side, x, code in zip(SIDES, tokens, codes, strict=True):
        close = frame.rebuild(side, code, spec.kv_heads)[0].swapaxes(0, 1).reshape(x.shape[1], -1)
        out.append((x[0].reshape(close.shape).astype(jnp.float32), close))
    return out


def cosines(x: jax.Array, close: jax.Array) -> jax.Array:
    """Of tokens `[S, W]` and rebuilt ones, `[S]`; 0 for one without a direction."""
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(close, axis=-1)
    return jnp.sum(x * close, axis=-1) / jnp.maximum(norms, 1e-30)


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


def check_hidden(model: Any) -> None:
    """Refuse a model whose keys and values are not x W, which equation 15 is of.

    Raises:
        ValueError: projections that are fused or latent, biases, or normed keys.
    """
    check_projections(model.params, "the study reconstruction", "")
    for field, what in (("qk_norm", "a norm"), ("qkv_bias", "a bias")):
        if getattr(model.config, field):
            raise ValueError(f"{field}=True: the study reconstruction is of models whose keys and values are x W, and "
                             f"this one has {what} behind W")


def hidden_updates(
    model: Any, moments: Moments, tokens: np.ndarray, rank: float = 0.5, alpha: float = 0.2, iterations: int = 3,
    steps: Sequence[tuple[str, float]] = (("sum", 0.0), ("sum", 1e-6), ("sum", 1e-5), ("bound", 0.01), ("bound", 0.1)),
) -> list[Hidden]:
    """The paper's encoder update in the space of equation 15: A = W V Sigma^-1/2, of which the last columns move, and
    B = Sigma^1/2 V^T, which stays; one prompt, all heads of a layer together.

    Args:
        moments: of the calibration.
        tokens: int32 `[S]`.

    Raises:
        ValueError: as `check_hidden`.
    """
    check_hidden(model)
    found: dict[tuple[str, str, float], list[float]] = {}
    for layer, taps in enumerate(iterate_taps(model.config, model.params, np.asarray(tokens)[None])):
        x = taps.x[0].astype(jnp.float32)
        for side, tap in (("k", "k_pre"), ("v", "v")):
            values, vectors = np.linalg.eigh(np.asarray(getattr(moments, tap)[layer]) / moments.tokens)
            kept = round(rank * len(values))
            v = jnp.asarray(vectors[:, ::-1][:, :kept], jnp.float32)
            root = jnp.asarray(np.maximum(values[::-1][:kept], 1e-12) ** 0.25, jnp.float32)
            kernel = model.params["layers"][layer]["attention"][PROJECTIONS[side]]["kernel"].astype(jnp.float32)
            y, moving = x @ kernel, max(1, int(alpha * kept))
            encoder = kernel @ v / root
            for scale, eta in steps:
                tail = _update(encoder[:, :-moving], encoder[:, -moving:], x, None, eta, iterations=iterations,
                               scale=scale, frozen_outputs=True)
                rebuilt = x @ jnp.concatenate([encoder[:, :-moving], tail], axis=1) @ (v * root).T
                found.setdefault((side, scale, eta), []).append(float(jnp.sum((y - rebuilt) ** 2) / jnp.sum(y**2)))
    return [Hidden(*key, float(np.mean(lost)) if np.isfinite(lost).all() else None) for key, lost in found.items()]
