"""What the columns of a basis explain, and how far learning turns them (StreamingKV, figures 5b and 5c)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.results.figure_file import new_figure, save_figure
from lowrank_kv_jax.evals.studies.streaming.learned_layers import SIDES, of_sides
from lowrank_kv_jax.method import Part


@dataclasses.dataclass(frozen=True)
class Columns:
    """Of one layer; columns in the order of the calibration, the largest singular values first, moving ones last.

    Attributes:
        explained: share of the variance of the tokens that the first 1, 2, ... columns rebuild, of several groups of
            heads the first so many of each.
        aligned: absolute cosine of each encoder column with itself before the update, mean over groups.
        subspace: ||Q_0^T Q||_F^2 / R of orthonormal bases of both encoders: 1 where they span the same.
    """

    spec: str
    text: str
    layer: int
    side: str
    explained: tuple[float, ...]
    aligned: tuple[float, ...]
    subspace: float

    def at(self, share: float) -> float:
        """Explained by the first `share` of the columns."""
        return self.explained[max(1, round(share * len(self.explained))) - 1]


def columns(
    model: Any, methods: Mapping[str, Part], bases: Mapping[str, Any], texts: Mapping[str, np.ndarray],
    progress: bool = False,
) -> list[Columns]:
    """Measure every layer at the end of the prompts.

    Args, raises: as of `of_sides`; rows of a text are averaged.
    """
    found, out = of_sides(model, methods, bases, texts, _measure, progress), []
    for key, windows in found.items():
        explained, aligned, subspace = (np.mean(own, axis=0) for own in zip(*windows, strict=True))
        out.append(Columns(*key, tuple(map(float, explained)), tuple(map(float, aligned)), float(subspace)))
    return out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(method, spec, bases, store, tokens):
    """Of keys and of values: explained `[R]`, aligned `[R]` and subspace."""
    before, after = method.frame(spec, bases, None), method.frame(spec, bases, store)
    out = []
    for side, x in zip(SIDES, tokens, strict=True):
        decoder = _of_row(getattr(after, side))
        first, encoder = (_of_row(_encoder(frame, side)) for frame in (before, after))
        x = x[0].astype(jnp.float32).reshape(x.shape[1], len(decoder), -1)
        x = x - x.mean(0)
        out.append((_explained(x, encoder, decoder), _aligned(first, encoder), _overlap(first, encoder)))
    return out


def _encoder(frame, side: str) -> jax.Array:
    own = getattr(frame, f"{side}_encoder")
    return getattr(frame, side) if own is None else own


def _of_row(basis: jax.Array) -> jax.Array:
    """Of the only row, `[J, W, R]`, float32."""
    return (basis[0] if basis.ndim == 4 else basis).astype(jnp.float32)


def _explained(x: jax.Array, encoder: jax.Array, decoder: jax.Array) -> jax.Array:
    """1 - ||X - X E_n D_n^T||^2 / ||X||^2 `[R]` of n = 1..R columns; x `[S, J, W]`, bases `[J, W, R]`."""
    highest = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    moment = highest("sjw,sju->jwu", x, x)
    image = highest("jwu,jur->jwr", moment, encoder)
    crossed = jnp.cumsum(jnp.sum(decoder * image, axis=(0, 1)))
    inner = jnp.sum(highest("jwr,jwq->jrq", encoder, image) * highest("jwr,jwq->jrq", decoder, decoder), axis=0)
    rebuilt = jnp.diagonal(jnp.cumsum(jnp.cumsum(inner, axis=0), axis=1))
    return (2 * crossed - rebuilt) / jnp.trace(moment, axis1=1, axis2=2).sum()


def _aligned(first: jax.Array, last: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(first, axis=1) * jnp.linalg.norm(last, axis=1)
    return jnp.mean(jnp.abs(jnp.sum(first * last, axis=1)) / jnp.maximum(norms, 1e-30), axis=0)


def _overlap(first: jax.Array, last: jax.Array) -> jax.Array:
    q, p = jnp.linalg.qr(first)[0], jnp.linalg.qr(last)[0]
    return jnp.mean(jnp.sum(jnp.matmul(q.mT, p, precision=jax.lax.Precision.HIGHEST) ** 2, axis=(1, 2))) / first.shape[-1]


def plot_columns(path: str, rows: Sequence[Columns], title: str) -> None:
    """Write a PNG of the middle layer: explained variance by columns (5b) and the alignment of each column (5c)."""
    layer = max(row.layer for row in rows) // 2
    rows = [row for row in rows if row.layer == layer]
    texts = list(dict.fromkeys(row.text for row in rows))
    specs = list(dict.fromkeys(row.spec for row in rows))
    figure = new_figure(figsize=(12, 7), layout="constrained")
    for axes, side in zip(figure.subplots(2, 2), SIDES, strict=True):
        for row in (row for row in rows if row.side == side):
            style = {"color": f"C{specs.index(row.spec)}", "linestyle": ("-", "--", ":", "-.")[texts.index(row.text) % 4]}
            number = np.arange(1, len(row.explained) + 1)
            axes[0].plot(number, row.explained, label=f"{row.spec}, {row.text}", **style)
            axes[1].plot(number, row.aligned, **style)
        name = {"k": "keys", "v": "values"}[side]
        axes[0].set(xlabel="columns", ylabel="explained variance", title=f"{name}, layer {layer + 1}", ylim=(None, 1.01))
        axes[1].set(xlabel="column", ylabel="cosine with itself before", title=f"{name}: alignment", ylim=(-0.02, 1.02))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    save_figure(figure, path, 130)
