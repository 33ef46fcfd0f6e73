"""What MiniCache would merge: how alike adjacent layers' latents are, beside the keys and values they stand for.

xKV (sections 3.1 and 5.3, figure 4) finds that MiniCache fails on latents as on whole keys, since it needs layers whose
tokens point the same way. Coefficients of different bases need not, whatever the layers have in common: the same
numbers are given after the best turn of one layer's space, which a basis could take up at no cost.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.evals.studies.cross_layer.analysis import check_tokens
from lowrank_kv_jax.segments.merged import slerp

MERGED_AT = 0.6
"""How far MiniCache's merged direction lies towards the second layer's, by default."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Of each pair of adjacent layers; heads of a layer side by side.

    Attributes:
        what: which vectors are compared.
        width: their channels.
        cosine: between two layers' vectors of the same token, mean over tokens.
        lost: share of both layers' energy that a SLERP merge loses, one direction and two magnitudes a token.
        turned, turned_lost: the same after the rotation of the first layer's vectors that brings them nearest to the
            second's (Procrustes).
        cka: linear centred kernel alignment, which no rotation changes.
    """

    what: str
    width: int
    cosine: tuple[float, ...]
    lost: tuple[float, ...]
    turned: tuple[float, ...]
    turned_lost: tuple[float, ...]
    cka: tuple[float, ...]


def pair_similarity(model: Any, tokens: np.ndarray, rank: float = 0.25) -> list[Pairs]:
    """Compare adjacent layers on a text of S tokens, int32 `[S]`.

    Args:
        rank: columns of each layer's own best basis (the Single SVD's) whose coefficients are compared, a share of the
            width.

    Returns:
        Of keys as they are cached and before RoPE, of values, and of coefficients of the latter two; of latent attention
        (MLA) of latents before their norm, and of coefficients of them.

    Raises:
        ValueError: as `layer_tokens`; a rank outside of (0, 1].
    """
    if not 0 < rank <= 1:
        raise ValueError(f"rank={rank}: must lie in (0, 1], a share of the width")
    check_tokens(model, tokens)
    found: dict[str, list[np.ndarray]] = {}
    before: dict[str, jax.Array] = {}
    for taps in iterate_taps(model.config, model.params, np.asarray(tokens)[None]):
        now = dict(_vectors(model.config.attention, taps, rank))
        for what, x in now.items():
            if what in before:
                found.setdefault(what, []).append(np.asarray(_compare(before[what], x)))
        before = now
    return [Pairs(what, before[what].shape[-1], *(tuple(map(float, x)) for x in zip(*pairs, strict=True)))
            for what, pairs in found.items()]


def _vectors(spec: Any, taps: Any, rank: float) -> Iterator[tuple[str, jax.Array]]:
    """What a layer's tokens are, float32 `[S, W]`, by name."""
    def flat(tap: jax.Array) -> jax.Array:
        return tap[0].astype(jnp.float32).reshape(tap.shape[1], -1)

    if spec.latent is not None:
        coded = {"latents": flat(taps.k_pre[..., -spec.latent.rank :])}
    else:
        yield "keys as cached", flat(taps.k)
        coded = {"keys": flat(taps.k_pre), "values": flat(taps.v)}
    yield from coded.items()
    for what, x in coded.items():
        yield f"coefficients of {what}", _coefficients(x, max(1, round(rank * x.shape[-1])))


@functools.partial(jax.jit, static_argnums=1)
def _coefficients(x: jax.Array, rank: int) -> jax.Array:
    """Of tokens `[S, W]` in the principal directions of their own second moment, the largest first `[S, R]`.

    A direction has no sign: here each has the one with which its mean coefficient is positive, so that layers with a
    large mean token are not told apart by chance.
    """
    directions = jnp.linalg.eigh(_mm(x.T, x))[1][:, ::-1][:, :rank]
    coefficients = _mm(x, directions)
    return jnp.where(coefficients.mean(0) < 0, -coefficients, coefficients)


@jax.jit
def _compare(x: jax.Array, y: jax.Array) -> jax.Array:
    """Fields of `Pairs` of tokens `[S, W]` of two layers, in their order."""
    u, _, v = jnp.linalg.svd(_mm(x.T, y))
    turned = _mm(x, _mm(u, v))
    a, b = x - x.mean(0), y - y.mean(0)
    energies = [jnp.sum(_mm(p.T, q) ** 2) for p, q in ((a, b), (a, a), (b, b))]
    cka = energies[0] / jnp.sqrt(jnp.maximum(energies[1] * energies[2], jnp.finfo(jnp.float32).tiny))
    return jnp.stack([_cosine(x, y), _merge_loss(x, y), _cosine(turned, y), _merge_loss(turned, y), cka])


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.mean(jnp.sum(x * y, axis=-1) / jnp.maximum(norms, 1e-30))


def _merge_loss(x: jax.Array, y: jax.Array) -> jax.Array:
    direction = slerp(x, y, MERGED_AT)
    lost = [jnp.sum((z - jnp.linalg.norm(z, axis=-1, keepdims=True) * direction) ** 2) for z in (x, y)]
    return sum(lost) / jnp.maximum(jnp.sum(x**2) + jnp.sum(y**2), 1e-30)


def _mm(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
