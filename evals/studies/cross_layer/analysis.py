"""How much the caches of different layers have in common (section 3 and figure 2 of xKV)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.codecs.layer_groups import stride_groups
from lowrank_kv_jax.evals.studies.bases.metrics import rank_of_energy


def check_tokens(model: Any, tokens: np.ndarray) -> None:
    """Refuse what is not one text, int32 `[S]`.

    Raises:
        ValueError: fewer than two tokens, or more than the model's context.
    """
    shape = np.shape(tokens)
    if len(shape) != 1 or not 2 <= shape[0] <= model.config.context:
        raise ValueError(f"tokens of shape {shape}: expected 2..{model.config.context} of one text")


def layer_tokens(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The cache of a text of S tokens, int32 `[S]`: the X_l of the paper, float32 `[L, S, W]`.

    Returns:
        "keys" (before RoPE) and "values", the heads of a layer side by side; of latent attention "latents", before
        their norm.

    Raises:
        ValueError: fewer than two tokens, or more than the model's context.
    """
    check_tokens(model, tokens)
    latent = model.config.attention.latent
    layers: dict[str, list[np.ndarray]] = {}
    for taps in iterate_taps(model.config, model.params, np.asarray(tokens)[None]):
        sides = {"keys": taps.k_pre, "values": taps.v}
        if latent is not None:
            sides = {"latents": taps.k_pre[..., -latent.rank :]}
        for side, tap in sides.items():
            layers.setdefault(side, []).append(np.asarray(tap, np.float32).reshape(len(tokens), -1))
    return {side: np.stack(parts) for side, parts in layers.items()}


@jax.jit
def _cross_energy(x: jax.Array, y: jax.Array) -> jax.Array:
    """|X^T Y|_F^2, which is trace(X X^T Y Y^T)."""
    return jnp.sum(jnp.square(jnp.matmul(x.T, y, precision=jax.lax.Precision.HIGHEST)))


def cka_matrix(x: np.ndarray) -> np.ndarray:
    """Linear centred kernel alignment between layers, `[L, L]`, of `x` `[L, S, W]`.

    trace(G_a G_b) / sqrt(trace(G_a^2) trace(G_b^2)) with G = H X X^T H (section 3.2), without forming the S
    x S matrices.
    """
    centred = jnp.asarray(x - x.mean(axis=1, keepdims=True))
    energy = np.zeros((len(x), len(x)))
    for a in range(len(x)):
        for b in range(a, len(x)):
            energy[a, b] = energy[b, a] = float(_cross_energy(centred[a], centred[b]))
    own = np.sqrt(np.maximum(np.diag(energy), np.finfo(np.float64).tiny))
    return energy / (own[:, None] * own[None])


def cosine_matrix(x: np.ndarray) -> np.ndarray:
    """Cosine between two layers' vectors of the same token, the mean over tokens, `[L, L]` (figure 2a)."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    flat = (x / np.maximum(norm, np.finfo(np.float32).tiny)).reshape(len(x), -1)
    return np.asarray(flat @ flat.T / x.shape[1], np.float64)


def group_ranks(x: np.ndarray, size: int, energy: float) -> list[tuple[int, int]]:
    """Rank that keeps `energy` of each stride group of `size` layers, and the group's width (figure 2c)."""
    ranks = []
    for group in stride_groups(len(x), size):
        joint = jnp.concatenate([jnp.asarray(x[layer]) for layer in group], axis=-1)
        moment = np.asarray(jnp.matmul(joint.T, joint, precision=jax.lax.Precision.HIGHEST), np.float64)
        ranks.append((int(rank_of_energy(moment, energy)), moment.shape[-1]))
    return ranks


class Analysis(NamedTuple):
    """What the layers of a model share on one text.

    Attributes:
        cka, cosine: `[L, L]` by side, as of `layer_tokens`.
        ranks: by side and group size, (rank, width) of each group.
        energy: share that the ranks keep.
    """

    cka: dict[str, np.ndarray]
    cosine: dict[str, np.ndarray]
    ranks: dict[str, dict[int, list[tuple[int, int]]]]
    energy: float

    def rank_ratio(self, side: str, size: int) -> float:
        """Columns needed over columns there are, all groups together."""
        ranks = self.ranks[side][size]
        return sum(rank for rank, _ in ranks) / sum(width for _, width in ranks)

    def table(self, size: int) -> str:
        """These ranks as the `table` field of xkv takes them; none for latents, which have one rank."""
        pairs = zip(self.ranks["keys"][size], self.ranks["values"][size], strict=True)
        return "/".join(f"{k}:{v}" for (k, _), (v, _) in pairs)

    def neighbours(self, side: str) -> tuple[float, float]:
        """Mean CKA and mean cosine of adjacent layers."""
        return float(np.diagonal(self.cka[side], 1).mean()), float(np.diagonal(self.cosine[side], 1).mean())


def analyse(
    model: Any, tokens: np.ndarray, sizes: Sequence[int] = (1, 2, 3, 5, 6), energy: float = 0.95
) -> Analysis:
    """Compare the layers of a model on one text.

    Args:
        model: a `LoadedModel`.
        tokens: int32 `[S]`.
        sizes: layers of a group; those beyond the depth are refused.
        energy: of the singular values squared, in (0, 1].

    Raises:
        ValueError: sizes, energy or tokens out of range.
    """
    layers = model.config.num_layers
    for size in sizes:
        if not 1 <= size <= layers:
            raise ValueError(f"group size {size}: the model has {layers} layers")
    if not 0 < energy <= 1:
        raise ValueError(f"energy={energy}: must lie in (0, 1]")
    caches = layer_tokens(model, tokens)
    return Analysis(
        {side: cka_matrix(x) for side, x in caches.items()},
        {side: cosine_matrix(x) for side, x in caches.items()},
        {side: {size: group_ranks(x, size, energy) for size in sizes} for side, x in caches.items()},
        energy,
    )
