"""Keys after RoPE at positions that a calibration's texts do not reach, of the same keys before it.

A basis of rotated keys holds for the positions that it was fitted at: slow channel pairs have not been everywhere yet,
and further on keys lie where the basis and its steps expect nothing. Keys before RoPE hardly know where they stand. So
their sums, turned by every position up to a length, are the sums after RoPE of texts of that length, in closed form:
with the two channels of a pair as one complex number z, E[z_i conj(z_j)] is multiplied by the mean over t of
exp(i t (w_i - w_j)).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Complex128, Float, Float64

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.estimators.moments import Moments

SHORTEST = 2048


def turned(spec: AttentionSpec, moments: Moments, lengths: tuple[int, ...]) -> Moments:
    """Moments whose keys after RoPE are those before it in texts of so many tokens: a mean over lengths, so that short
    texts count as much as long ones. Of groups of layers, too."""
    def turn(x: np.ndarray, layers: Sequence[int], both: bool = True) -> np.ndarray:
        heads = [_pairs(spec.each_rope[layer], spec.head_dim) for layer in layers for _ in range(spec.kv_heads)]
        return _turned(np.asarray(x, np.float64), heads, heads if both else None, lengths)

    found: dict[str, Any] = {"k": np.stack([turn(x, (layer,)) for layer, x in enumerate(moments.k_pre)])}
    if moments.k_pre_sum is not None:
        sums = np.asarray(moments.k_pre_sum)[..., None]
        found["k_sum"] = np.stack([turn(x, (layer,), both=False)[:, 0] for layer, x in enumerate(sums)])
    for name in ("across", "keys_by_values"):
        groups = getattr(moments, name)
        if groups is not None:
            found[name] = {own: x._replace(k=turn(x.k_pre, own, name == "across")) for own, x in groups.items()}
    return moments._replace(**found)


def turned_around_mean(spec: AttentionSpec, moments: Moments, length: int) -> Moments:
    """The same in texts of one length, of keys whose deviations from their mean turn and whose mean stays what it is
    before RoPE."""
    if moments.k_pre_sum is None:
        return turned(spec, moments, (length,))
    sides = {name: moments.mean(name) for name in ("k_pre", "v")}

    def outer(layers: Sequence[int], other: str) -> np.ndarray:
        k, others = (sides[name][list(layers)].ravel() for name in ("k_pre", other))
        return moments.tokens * np.outer(k, others)

    def moved(own: Moments, by: float, names: tuple[str, str]) -> Moments:
        """Sums with those of the means on top, so many times."""
        source, target = names
        found: dict[str, Any] = {target: np.stack([
            x + by * outer((layer,), "k_pre") for layer, x in enumerate(np.asarray(getattr(own, source), np.float64))])}
        for name, other in (("across", "k_pre"), ("keys_by_values", "v")):
            groups = getattr(own, name)
            if groups is not None:
                found[name] = {layers: x._replace(**{target: getattr(x, source) + by * outer(layers, other)})
                               for layers, x in groups.items()}
        return own._replace(**found)

    centred = moved(moments, -1.0, ("k_pre", "k_pre"))._replace(k_pre_sum=None)
    found = moved(turned(spec, centred, (length,)), 1.0, ("k", "k"))
    return found._replace(k_sum=moments.k_pre_sum, k_pre_sum=moments.k_pre_sum)


def lengths_to(positions: int) -> tuple[int, ...]:
    """`positions`, half of it, .., `SHORTEST`."""
    lengths = [positions]
    while lengths[-1] > SHORTEST:
        lengths.append(max(lengths[-1] // 2, SHORTEST))
    return tuple(lengths)


Head = tuple[Complex128[np.ndarray, "D D"], Float64[np.ndarray, " D"]]
"""What makes complex numbers of a head's channels, unitary, and by which angle a position turns each."""


@functools.lru_cache
def _pairs(rope: RopeSpec | None, dim: int) -> Head:
    unitary, speed = np.eye(dim, dtype=complex), np.zeros(dim)
    if rope is not None:
        first = np.arange(rope.rotary_dim // 2)
        second = first + len(first)
        unitary[first, first] = unitary[second, first] = 0.5**0.5
        unitary[first, second], unitary[second, second] = 1j * 0.5**0.5, -1j * 0.5**0.5
        speed[first], speed[second] = rope.inverse_frequencies(), -rope.inverse_frequencies()
    return unitary, speed


def _turned(
    x: Float64[np.ndarray, "R C"], rows: Sequence[Head], columns: Sequence[Head] | None, lengths: tuple[int, ...]
) -> Float64[np.ndarray, "R C"]:
    """Sums of products whose rows are heads' channels, and whose columns are, too, or stay as they are."""
    y, angle = _each([u for u, _ in rows], x), np.concatenate([w for _, w in rows])[:, None]
    if columns is not None:
        y, angle = _each([u for u, _ in columns], y.conj().T).conj().T, angle - np.concatenate([w for _, w in columns])
    y = y * sum(_mean_turn(angle, length) for length in lengths) / len(lengths)
    y = _each([u.conj().T for u, _ in rows], y)
    return (y if columns is None else _each([u.conj().T for u, _ in columns], y.conj().T).conj().T).real


def _each(matrices: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray:
    """A matrix for the rows of each head."""
    return np.concatenate([u @ part for u, part in zip(matrices, np.split(x, len(matrices)), strict=True)])


def _mean_turn(angle: Float[np.ndarray, "*any"], length: int) -> Complex128[np.ndarray, "*any"]:
    """Mean of exp(i t angle) over t = 0 .. length - 1."""
    half = np.sin(angle / 2)
    still = np.abs(half) < 1e-12
    size = np.where(still, 1.0, np.sin(length * angle / 2) / (length * np.where(still, 1.0, half)))
    return size * np.exp(0.5j * angle * (length - 1))
