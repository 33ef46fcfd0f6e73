"""Bits by component for the low-rank codecs: which coefficients get how many, of what calibration knows of them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.transform_metrics import OF_VALUES, attention
from lowrank_kv_jax.codecs.widths import Widths, total_bytes
from lowrank_kv_jax.estimators.bit_allocation import Profile, allocate, at_most, runs_of
from lowrank_kv_jax.estimators.moments import Moments, head_blocks
from lowrank_kv_jax.storage.quantised import TOKEN_BITS
from lowrank_kv_jax.storage.water_filled import WIDTHS, WidthRuns, bytes_of, components_of

PROFILES = 4
"""Different widths that the layers of a model may have, each a program of its own."""
LEAST = 1e-5
"""Deviations below this share of a basis' largest count as much: a step must not be zero."""
FALL = {"k": 1.0, "v": 0.6}
"""Powers by which variances fall from one component of a prompt's basis to the next, where nothing was calibrated."""


def check_bits(bits: float | None, by_component: bool) -> None:
    """Raise ValueError unless a codec can store its coefficients in so many bits.

    Args:
        by_component: whether it can give each component its own.
    """
    if bits is None or bits in TOKEN_BITS or by_component and 0 < bits <= WIDTHS[0]:
        return
    uniform = ", ".join(map(str, TOKEN_BITS))
    more = f", or another mean above 0 and up to {WIDTHS[0]} by component" if by_component else ""
    raise ValueError(f"bits={bits!r}: allowed are None, {uniform}{more}")


def mean_bits(bits: float | None) -> float | None:
    """The mean, where components have bits of their own; None where all have as many, or are floats."""
    return None if bits is None or bits in TOKEN_BITS else float(bits)


def uniform_bits(bits: float | None) -> int | None:
    """What every component has; None where they have their own, or are floats."""
    return int(bits) if bits in TOKEN_BITS else None


def stored_ranks(profile: Profile | None, ranks: tuple[int, int]) -> tuple[int, int]:
    """Components of keys and values that have bits, of so many."""
    return ranks if profile is None else (components_of(profile[0]), components_of(profile[1]))


@functools.cache
def typical_profile(rank_k: int, rank_v: int, bits: float) -> Profile:
    """Widths for bases that are fitted to each prompt, whose variances no calibration knows.

    Shapes have to be known before a prompt is. So components are ordered by the prompt's variances and their steps are
    its deviations, but how many of them have which width follows from variances that fall by a power (`FALL`), errors of
    keys and of values being relative to their own variance.
    """
    falls = [np.arange(1, rank + 1, dtype=np.float64) ** -FALL[side] for side, rank in (("k", rank_k), ("v", rank_v))]
    k, v = (np.pad(x / x.sum(), (0, max(rank_k, rank_v) - len(x)))[None] for x in falls)
    ((of_k, of_v),) = allocate((k, OF_VALUES * v), (bits * rank_k, bits * rank_v), 1, True, components=1)
    return at_most(of_k, rank_k), at_most(of_v, rank_v)


@functools.cache
def typical_runs(rank: int, bits: float) -> WidthRuns:
    """The same for one basis alone, whose variances fall as those of keys do."""
    fall = np.arange(1, rank + 1, dtype=np.float64)[None] ** -FALL["k"]
    none = np.zeros_like(fall)
    least = 8 * bytes_of(runs_of(none[0]))
    ((runs, _),) = allocate((fall, none), (bits * rank, float(least)), 1, True, components=1)
    return runs


class _Side(NamedTuple):
    """Keys or values of a layer in its basis, components in order of falling errors.

    Attributes:
        basis: float64 `[J, W, R]`; `[1, W, R]` where all heads share it.
        scale, zero: standard deviations and means of the coefficients `[J, R]`.
        errors: what is lost without a component, summed over the heads `[R]`.
    """

    basis: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    errors: np.ndarray


def by_component(
    codec: Any, spec: AttentionSpec, moments: Moments, fitted: Sequence[Any], bits: float
) -> tuple[Any, ...]:
    """Bases of each layer whose components have bits, in order of falling errors, and which.

    Errors of keys are those of logits, errors of values relative to their variance (`transform_metrics.attention`); one
    budget serves keys, values and layers.

    Args:
        codec: with `rope` and `basis_heads`.
        fitted: of each layer k, v `[J, W, R]`, means or None, and scales, zeros and widths that are still None.
        bits: mean of a component.

    Raises:
        ValueError: moments without queries.
    """
    tap, heads = "k_pre" if codec.rope == "pre" else "k", codec.basis_heads(spec)
    metric = attention(spec, moments, tap)
    weight = np.asarray(metric.k).reshape(spec.num_layers, heads, -1)
    k = [_side(moments, tap, layer, heads, own.k, getattr(own, "k_mean", None), weight[layer])
         for layer, own in enumerate(fitted)]
    v = [_side(moments, "v", layer, heads, own.v, getattr(own, "v_mean", None), None) for layer, own in enumerate(fitted)]
    assert metric.v_counts is not None
    most = max(len(side.errors) for side in (*k, *v))
    spectra = (_spectra(k, most), metric.v_counts * _spectra(v, most))
    budget = [bits * sum(len(side.errors) for side in sides) for sides in (k, v)]
    found = allocate(spectra, (budget[0], budget[1]), PROFILES, True, components=1)
    profiles = [(at_most(of_k, len(keys.errors)), at_most(of_v, len(values.errors)))
                for (of_k, of_v), keys, values in zip(found, k, v, strict=True)]
    total = total_bytes(profiles)
    out = []
    for own, keys, values, profile in zip(fitted, k, v, profiles, strict=True):
        arrays: dict[str, Any] = {}
        for name, side, runs in (("k", keys, profile[0]), ("v", values, profile[1])):
            found = zip((name, f"{name}_scale", f"{name}_zero"), (side.basis, side.scale, side.zero), strict=True)
            arrays |= {key: jnp.asarray(x[..., : components_of(runs)], jnp.float32) for key, x in found}
        out.append(own._replace(**arrays, widths=Widths(1, (profile,), (total,))))
    return tuple(out)


def _side(
    moments: Moments, tap: str, layer: int, heads: int, basis: Any, around: Any, weight: np.ndarray | None
) -> _Side:
    """Keys or values of a layer.

    Args:
        around: `[K, D]` that is taken off before tokens are coded; None is 0.
        weight: what each channel's error counts `[J, W]`; None: errors are relative to the variance of all channels.
    """
    own = np.asarray(basis, np.float64)
    u = np.broadcast_to(own, (heads, *own.shape[1:]))
    moment = head_blocks(np.asarray(getattr(moments, tap)[layer], np.float64)[None] / moments.tokens, heads)[0]
    mean = moments.mean(tap)[layer].reshape(heads, -1)
    zero = np.einsum("jw,jwr->jr", mean, u)
    variance = np.maximum(np.einsum("jwr,jwv,jvr->jr", u, moment, u, optimize=True) - zero**2, 0.0)
    if weight is None:
        total = np.trace(moment, axis1=1, axis2=2).sum() - (mean**2).sum()
        errors = variance / (total if total > 0 else 1.0)
    else:
        errors = variance * np.einsum("jwr,jw->jr", u**2, weight**2)
    if around is not None:
        zero = zero - np.einsum("jw,jwr->jr", np.asarray(around, np.float64).reshape(heads, -1), u)
    scale = np.sqrt(variance)
    floor = np.maximum(scale.max(-1, keepdims=True) * LEAST, np.finfo(np.float32).tiny * 1e6)
    key = errors if len(own) == heads else errors.sum(0, keepdims=True)
    order = np.argsort(-key, axis=-1, kind="stable")
    each = np.broadcast_to(order, errors.shape)
    scale, zero, errors = (np.take_along_axis(x, each, axis=-1) for x in (np.maximum(scale, floor), zero, errors))
    return _Side(np.take_along_axis(own, order[:, None], axis=-1), scale, zero, errors.sum(0))


def _spectra(sides: Sequence[_Side], most: int) -> np.ndarray:
    """Errors of each layer, of falling size `[L, most]`."""
    return np.stack([np.pad(np.sort(side.errors)[::-1], (0, most - len(side.errors))) for side in sides])


def check_widths(codec: Any, bases: Any, bits: float | None) -> None:
    """Raise ValueError where bases have widths and the codec asks for none, or the other way round."""
    if (bases.widths is None) != (bits is None):
        found, wanted = (("no widths", f"bits={bits}") if bases.widths is None else ("widths of components", "none"))
        raise ValueError(f"bases with {found}: {codec.name} with these settings takes {wanted}: calibrate for it")
