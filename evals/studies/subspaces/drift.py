"""Residuals of Online Subspace Projection against position and RoPE phase, and chunks against the drift of a text."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.calibrate import iterate_taps
from lowrank_kv_jax.codecs.osp_chunks import overlap_of
from lowrank_kv_jax.estimators.svd import principal_subspace
from lowrank_kv_jax.evals.studies.subspaces.chunk_errors import CodedPrompt, code_prompt, sketching
from lowrank_kv_jax.evals.studies.subspaces.prediction import rank_correlation
from lowrank_kv_jax.generation.forward import compress_group, make_layout

TURNS = (0.0625, 0.25, 1.0, 4.0, np.inf)
"""Edges of bins of the phase that a frequency pair has gone through since its chunk began, in turns."""


class Sums(NamedTuple):
    """Squared norms and what codes leave of them, by position `[n, 2]` of keys and of values, and by phase `[5, 2]`."""

    keys: np.ndarray
    values: np.ndarray
    phases: np.ndarray


def residual_profile(
    model: Any, method: Any, tokens: np.ndarray, bases: Any, dtype: Any, parts: int = 8
) -> list[dict[str, Any]]:
    """RER of keys and values by position in the text, and of keys' frequency pairs by the phase since the chunk began.

    Args:
        tokens: int32 `[B, S]`.
        parts: of the text.

    Returns:
        Rows of "what", "rer_k", "rer_v" (None for phases), and of all tokens "spearman", the rank correlations of their
        relative residuals with position and with their age in the chunk, means over layers and heads.
    """
    method = sketching(method)
    layout = make_layout(model.config, *tokens.shape, tokens.shape[1], dtype=dtype)
    total, position, age = None, [], []
    for layer, taps in enumerate(iterate_taps(model.config, model.params, tokens)):
        own = layout.of_layer(layer)
        found = code_prompt(method, own, bases[layer], taps)
        sums, of_position, of_age = _profile(own, found, parts)
        total = sums if total is None else Sums(*(a + b for a, b in zip(total, sums, strict=True)))
        position.append(of_position)
        age.append(of_age)
    assert total is not None
    bounds = np.linspace(0, tokens.shape[1] - method.sinks - method.recent, parts + 1).astype(int) + method.sinks
    rows = [{"what": f"tokens {a} to {b - 1}", "rer_k": k[1] / max(k[0], 1e-30), "rer_v": v[1] / max(v[0], 1e-30)}
            for a, b, k, v in zip(bounds, bounds[1:], total.keys, total.values, strict=False)]
    names = [f"below {x:g} turns" for x in TURNS[:-1]] + [f"from {TURNS[-2]:g} turns on"]
    rows += [{"what": f"pairs, phase {name}", "rer_k": x[1] / max(x[0], 1e-30), "rer_v": None}
             for name, x in zip(names, total.phases, strict=True) if x[0] > 0]
    for name, x in (("position", position), ("age in the chunk", age)):
        k, v = (float(mean) for mean in np.mean(x, axis=0))
        rows.append({"what": f"rank correlation with {name}", "rer_k": k, "rer_v": v})
    return rows


def _profile(layout: Any, found: CodedPrompt, parts: int) -> tuple[Sums, np.ndarray, np.ndarray]:
    """Sums of a layer, and rank correlations of keys' and values' relative residuals with position and age, means."""
    coded, owner = np.asarray(found.coded), np.asarray(found.owner)
    page = found.k.shape[2] // owner.shape[1]
    place = np.broadcast_to(np.arange(coded.shape[1]), coded.shape)
    chunk = np.repeat(owner, page, axis=1)
    first = np.stack([np.searchsorted(row, row) for row in chunk])  # owners never fall
    k, seen_k, v, seen_v = (np.asarray(x, np.float64) for x in (found.k, found.seen_k, found.v, found.seen_v))
    sides = ((k, seen_k), (v, seen_v))
    most = max(int(coded.sum(1).max()), 1)
    by_part, correlations = [], []
    for x, close in sides:
        norm, left = (x**2).sum(-1), ((x - close) ** 2).sum(-1)
        bins = np.minimum(place * parts // most, parts - 1)
        of_part = [((bins == i) & coded)[:, None] for i in range(parts)]
        by_part.append(np.array([[(a * own).sum() for a in (norm, left)] for own in of_part]))
        relative = np.sqrt(left / np.maximum(norm, 1e-30))
        correlations.append([
            [rank_correlation(axis[b][coded[b]], relative[b, h][coded[b]]) for axis in (place, place - first)]
            for b in range(len(x)) for h in range(x.shape[1])
        ])
    of_axis = np.asarray(correlations).mean(1)  # sides, axes
    return Sums(*by_part, _by_phase(layout, *sides[0], place - first, coded)), of_axis[:, 0], of_axis[:, 1]


def _by_phase(layout: Any, x: np.ndarray, close: np.ndarray, age: np.ndarray, coded: np.ndarray) -> np.ndarray:
    """Energies of frequency pairs and of what is left of them, `[5, 2]`, by the phase that they went through."""
    rope = layout.spec.rope
    if rope is None:
        return np.zeros((len(TURNS), 2))
    half = rope.rotary_dim // 2
    turns = age[..., None] * np.abs(np.asarray(rope.inverse_frequencies(), np.float64)) / (2 * np.pi)
    which = np.searchsorted(TURNS, turns, side="right")  # b s pairs
    both = []
    for part in (x, x - close):
        energy = part[..., :half] ** 2 + part[..., half : 2 * half] ** 2  # b k s pairs
        both.append([(energy.sum(1) * ((which == i) & coded[..., None])).sum() for i in range(len(TURNS))])
    return np.stack(both, axis=1)


def chunks_against_drift(
    model: Any, method: Any, texts: dict[str, np.ndarray], bases: Any, dtype: Any
) -> list[dict[str, Any]]:
    """How many chunks each text begins beside how far its subspaces move, means over layers.

    Args:
        method: of which a chunk ends by a threshold too.
        texts: tokens int32 `[B, S]` by name.

    Returns:
        Rows of "what", "chunks" and "drift": 1 less the overlap of the principal subspaces of adjacent pages, of keys.
        The last one holds the rank correlation over layers and texts.
    """
    if method.tau_k is None and method.tau_v is None:
        raise ValueError("tau_k=None, tau_v=None: without a threshold all texts begin as many chunks")
    rows, every = [], []
    method = sketching(method)
    for name, tokens in texts.items():
        layout = make_layout(model.config, *tokens.shape, tokens.shape[1], dtype=dtype)
        lengths = jnp.full((len(tokens),), tokens.shape[1], jnp.int32)
        points = []
        for layer, taps in enumerate(iterate_taps(model.config, model.params, tokens)):
            own = layout.of_layer(layer)
            state = compress_group(method, own, bases[layer], (taps,), lengths)
            keys = (taps.k_pre if method.rope == "pre" else taps.k)[:, method.sinks : taps.k.shape[1] - method.recent]
            drift = float(_drift(keys, method.page, bases[layer].k.shape[-1]))
            points.append((float(np.mean(state.store.chunks.used)), drift))
        every += points
        rows.append({"what": name, "chunks": float(np.mean(points, 0)[0]), "drift": float(np.mean(points, 0)[1])})
    x, y = np.asarray(every).T
    return [*rows, {"what": "rank correlation", "chunks": rank_correlation(x, y), "drift": None}]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drift(keys: jax.Array, page: int, rank: int) -> jax.Array:
    """Of `[B, T, K, D]`, mean over heads and pairs of adjacent whole pages."""
    x = keys[:, : keys.shape[1] // page * page].astype(jnp.float32)
    x = x.reshape(len(x), -1, page, *x.shape[2:])
    bases = principal_subspace(jnp.einsum("bptkd,bptke->bpkde", x, x, precision=jax.lax.Precision.HIGHEST), rank)
    return 1 - jnp.mean(overlap_of(bases[:, :-1], bases[:, 1:]))
