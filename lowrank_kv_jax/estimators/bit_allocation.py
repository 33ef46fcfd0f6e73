"""Bits in proportion to log-variance: reverse water-filling over the widths that pack (Huang and Schultheiss, 1963).

A component of variance s^2 in b bits errs by s^2 `DISTORTION[b]`, a convex curve over the widths 8, 4, 2, 1 and 0. At a
price a bit every component takes the width at which error plus price is least; that is what a greedy choice of the
steepest gain a bit arrives at, and no other choice of as many bits errs less.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int

from lowrank_kv_jax.storage.water_filled import WIDTHS, WidthRuns, bytes_of, in_words

RANGE, RANGE_OF_FIRST = 8.0, 12.0
"""Deviations that 8 bits reach. Inside of a text some tokens act as sinks, and lie 8 out along the first component of the
keys; cut off at the 4.5 that are best for a Gaussian, they made up nearly all of the error of early layers. Along others
values of rare tokens lie up to 10 out, too few for a coarser step."""
STEP = {1: 1.15 * 1.596, 2: 1.15 * 0.9957, 4: 1.15 * 0.3352, 8: 2 * RANGE / 2**8}
"""Step in units of a component's deviation: the best of a uniform quantiser of a Gaussian one (Max, 1960), times 1.15 for
heavier tails; of 8 bits what the range asks for."""
STEP_OF_FIRST = 2 * RANGE_OF_FIRST / 2**8
DISTORTION = {0: 1.0, 1: 0.3634, 2: 0.1188, 4: 0.01154, 8: 0.00033}
"""Mean squared error of a Gaussian component of variance 1 in so many bits."""
WIDE, WIDE_OF_BOTH = 1, 2
"""First components of keys that have 8 bits at any price, because of those tokens; and of keys and values in one code,
where another component may come first."""
LLOYD = 12  # rounds of sharing profiles among layers
HALVINGS = 24  # of the interval that holds a price
PRICES = 512
FINE, COARSE = 0.015, 0.1
"""By how much a rung of a ladder has fewer bits than the one before: above a quarter of the most, and below."""

Profile = tuple[WidthRuns, WidthRuns]
"""Widths of a layer's keys and values; those of values are empty where both are one code."""
Spectra = tuple[np.ndarray, np.ndarray]
"""Variances `[L, W]` of keys and values, of layers (or groups of them) in order, largest first; 0 where a smaller group
has no component. `[L, 0]` of values: keys and values are one code, whose spectrum is the first."""

_ALL = (*WIDTHS, 0)
_ERROR = np.array([DISTORTION[bits] for bits in _ALL])


def widths_at(variances: Float[np.ndarray, "*lead W"], price: float) -> Int[np.ndarray, "*lead W"]:
    """Widths, of the shape of `variances`, at which the error and `price` times the bits are least together."""
    cost = np.asarray(variances, np.float64)[..., None] * _ERROR + price * np.array(_ALL)
    return np.where(variances > 0, np.array(_ALL)[np.argmin(cost, axis=-1)], 0)


def runs_of(widths: Int[np.ndarray, " W"], wide: int = 0) -> WidthRuns:
    """WidthRuns of whole bytes nearest to falling widths `[W]`, of many whole words; at least one, where there are any.

    Args:
        wide: first components that have 8 bits whatever their width is.
    """
    total, begin, runs = len(widths), 0, []
    widths = np.where(np.arange(total) < wide, WIDTHS[0], widths)
    for bits in WIDTHS:
        each, wanted = 8 // bits, int(np.sum(widths >= bits)) - begin
        count = min(max(each * round(wanted / each), 0), total - begin)
        if count:
            runs.append((bits, count))
        begin += count
    return in_words(tuple(runs) or ((1, min(8, total)),), total) if total else ()


def at_most(runs: WidthRuns, components: int) -> WidthRuns:
    """The first of so many components: a profile that layers of a larger rank chose, too. No bytes more than `runs`."""
    out, left = [], components
    for bits, count in runs:
        out.append((bits, min(count, left)))
        left -= out[-1][1]
    return in_words(tuple((bits, count) for bits, count in out if count), components)


def steps_of(runs: WidthRuns) -> Float64[np.ndarray, " R"]:
    """Step of each component that has bits in units of its deviation, float64 `[R]`."""
    steps = np.concatenate([np.full(count, STEP[bits]) for bits, count in runs])
    steps[: min(WIDE_OF_BOTH, dict(runs).get(8, 0))] = STEP_OF_FIRST  # runs begin with the widest
    return steps


def bits_of(profile: Profile) -> int:
    """Bits of a token, whole bytes."""
    return 8 * sum(map(bytes_of, profile))


def error_of(variances: Float[np.ndarray, "L W"], runs: WidthRuns) -> Float[np.ndarray, " L"]:
    """Predicted squared error `[L]` of components of `variances` `[L, W]`."""
    each = np.concatenate([[], *(np.full(count, DISTORTION[bits]) for bits, count in runs)])
    return variances @ np.pad(each, (0, variances.shape[-1] - len(each)), constant_values=1.0)


def profiles_at(spectra: Spectra, prices: tuple[float, float], count: int) -> list[Profile]:
    """The profile of each layer, of which there are at most `count` (Lloyd's rule: layers choose among profiles, and each
    profile serves the layers that chose it best).

    Args:
        prices: of a bit of keys, and of values.
    """
    layers = len(spectra[0])
    wanted = sum(widths_at(side, price).sum(-1) for side, price in zip(spectra, prices, strict=True))
    members = [part for part in np.array_split(np.argsort(wanted, kind="stable"), min(count, layers))]
    chosen, found = None, []
    for _ in range(LLOYD):
        found = [_profile(spectra, own, prices) for own in members]
        costs = np.stack([
            sum(error_of(side, runs) + 8 * price * bytes_of(runs)
                for side, runs, price in zip(spectra, profile, prices, strict=True))
            for profile in found
        ])
        best = np.argmin(costs, axis=0)
        if chosen is not None and (best == chosen).all():
            break
        chosen = best
        members = [np.flatnonzero(best == i) for i in range(len(found)) if (best == i).any()]
        found, chosen = [found[i] for i in sorted(set(best))], np.unique(best, return_inverse=True)[1]
    assert chosen is not None and len(chosen) == layers
    return [found[i] for i in chosen]


def ladder(spectra: Spectra, most: float, count: int, components: int | None = None) -> list[list[Profile]]:
    """Profiles of each layer, with a mean of `most` bits, or the fewest there are, and then fewer and fewer; arguments
    as of `allocate`.

    Which layers share a profile is the same on every rung, as it is best at three quarters of the most.
    """
    at = min(0.75 * most, 8.0)
    shared = allocate(spectra, (at, at), count, True, components)
    members = [np.flatnonzero([own == other for own in shared]) for other in dict.fromkeys(shared)]
    limit = bits = 2 * most * (components or spectra[0].size)
    found: list[list[Profile]] = []
    rung: list[Any] = []
    highest = max(side.max(initial=0.0) for side in spectra)
    for price in highest * np.concatenate([[0.0], np.geomspace(1e-8, 1.0, PRICES)]):
        rung = [None] * len(shared)
        for own in members:
            profile = _profile(spectra, own, (price, price))
            for layer in own:
                rung[layer] = profile
        spent = sum(map(bits_of, rung))
        if spent <= limit:
            found.append(rung)
            limit = spent * (1 - (FINE if spent > bits / 4 else COARSE))
    return found or [rung]


def _profile(spectra: Spectra, layers: np.ndarray, prices: tuple[float, float]) -> Profile:
    """The best one that these layers can share."""
    wide = (WIDE if spectra[1].size else WIDE_OF_BOTH, 0)
    k, v = (runs_of(widths_at(side[layers].mean(0), price), first)
            for side, price, first in zip(spectra, prices, wide, strict=True))
    return k, v


def allocate(
    spectra: Spectra, bits: tuple[float, float], count: int, pooled: bool, components: int | None = None
) -> list[Profile]:
    """The profile of each layer, at most `count` different ones, whose mean over all components is at most `bits`.

    Args:
        bits: of a component of keys, and of values.
        pooled: keys and values share one budget, the sum of both; otherwise each has its own price.
        components: of keys (as of values), over all layers; by default all of the spectra's.
    """
    components = components or spectra[0].size
    budget = components * sum(bits)
    if pooled:
        prices = (1.0, 1.0)
    else:
        prices = tuple(_price(lambda p, s=side: widths_at(s, p).sum(), own * components, side)
                       for side, own in zip(spectra, bits, strict=True))

    def spent(factor: float) -> int:
        return sum(map(bits_of, profiles_at(spectra, (factor * prices[0], factor * prices[1]), count)))

    factor = _price(spent, budget, *spectra, unit=max(prices))
    return profiles_at(spectra, (factor * prices[0], factor * prices[1]), count)


def _price(spent, budget: float, *variances: np.ndarray, unit: float = 1.0) -> float:
    """About the least price at which `spent(price)` bits are no more than `budget`."""
    if spent(0.0) <= budget:
        return 0.0
    most = max(side.max(initial=0.0) for side in variances)
    low, high = np.log(most * 1e-12 / unit), np.log(2 * most / unit)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(np.exp(middle)) > budget else (low, middle)
    return float(np.exp(high))
