"""Bits by component: the choice at a price against brute force, runs of whole bytes, one budget over layers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.estimators.bit_allocation import (
    DISTORTION,
    STEP,
    WIDE_OF_BOTH,
    allocate,
    bits_of,
    error_of,
    ladder,
    profiles_at,
    runs_of,
    steps_of,
    widths_at,
)
from lowrank_kv_jax.storage.water_filled import bytes_of, components_of

ALL = np.array(list(itertools.product((8, 4, 2, 1, 0), repeat=8)))
BITS = ALL.sum(1)
ERRORS = np.vectorize(DISTORTION.get)(ALL)


@given(st.integers(0, 2**16), st.floats(-6, 1))
@settings(max_examples=15, deadline=None)
def test_no_choice_of_as_many_bits_errs_less(seed, exponent):
    """All 390,625 choices for eight components."""
    variances = np.sort(np.random.default_rng(seed).lognormal(sigma=3, size=8))[::-1]
    widths = widths_at(variances, variances[0] * 10**exponent)
    assert (np.diff(widths) <= 0).all()  # more bits where there is more variance
    best = (ERRORS @ variances)[BITS <= widths.sum()].min()
    assert variances @ np.vectorize(DISTORTION.get)(widths) <= best * (1 + 1e-12)


def test_greedy_gains_arrive_at_the_same_widths():
    variances = np.sort(np.random.default_rng(0).lognormal(sigma=2, size=40))[::-1]
    order, widths = (0, 1, 2, 4, 8), np.zeros(40, int)
    for _ in range(60):
        gains = [(variances[i] * (DISTORTION[w] - DISTORTION[up]) / (up - w), i, up)
                 for i, w in enumerate(widths) if w < 8 for up in order[order.index(w) + 1 : order.index(w) + 2]]
        gain, i, up = max(gains)
        widths[i] = up
    np.testing.assert_array_equal(widths_at(variances, gain * (1 - 1e-9)), widths)


@pytest.mark.parametrize("widths", [[8] * 3 + [4] * 3 + [2] * 6 + [1] * 9 + [0] * 5, [8] * 5, [0] * 12, [1] * 3, [4] * 7 + [0] * 60])
def test_runs_are_near_and_whole_bytes(widths):
    runs = runs_of(np.array(widths))
    assert components_of(runs) <= len(widths) and bytes_of(runs) >= 1
    assert abs(8 * bytes_of(runs) - sum(widths)) <= 12
    inner = [count * bits % 8 == 0 for bits, count in runs]
    assert all(inner) or components_of(runs) == len(widths)  # only the last components leave a byte open
    steps, bits = steps_of(runs), np.concatenate([np.full(count, own) for own, count in runs])
    first = (np.arange(len(bits)) < 2) & (bits == 8)  # reaches tokens that act as sinks
    np.testing.assert_allclose(steps, np.where(first, 24 / 256, [STEP[own] for own in bits]))


def spectra(layers=12, width=64):
    rng = np.random.default_rng(1)
    return tuple(np.sort(rng.lognormal(rng.normal(size=(layers, 1)), 2, (layers, width)))[:, ::-1] for _ in "kv")


@pytest.mark.parametrize("bits", [0.5, 1.0, 2.0, 3.7])
def test_one_budget_over_layers_keys_and_values(bits):
    sides = spectra()
    found = {count: allocate(sides, (bits, bits), count, pooled=True) for count in (1, 4, 12)}
    errors = {}
    for count, profiles in found.items():
        mean = sum(map(bits_of, profiles)) / sum(side.size for side in sides)
        least = 0.93 if bits >= 1 else 0.85  # words are coarse beside 4 bytes of a token
        assert least * bits <= mean <= bits and len(set(profiles)) <= count
        errors[count] = sum(error_of(side[i], runs) for i, own in enumerate(profiles) for side, runs in zip(sides, own, strict=True))
    assert errors[12] <= errors[4] * 1.02 < errors[1] * 1.02
    assert errors[4] < 0.5 * errors[12] + 0.5 * errors[1]  # a few profiles are most of the way


def test_keys_and_values_may_have_budgets_of_their_own():
    sides = spectra()
    profiles = allocate(sides, (3.0, 1.0), 4, pooled=False)
    k, v = (sum(bytes_of(own[i]) * 8 for own in profiles) / sides[i].size for i in (0, 1))
    assert 2.6 < k < 3.3 and 0.8 < v < 1.2
    assert set(allocate(sides, (8.0, 8.0), 4, pooled=True)) == {(((8, 64),), ((8, 64),))}


def test_layers_without_variance_take_no_bits_from_others():
    k, v = spectra()
    k[3:6], v[3:6] = 0.0, 0.0
    profiles = profiles_at((k, v), (1.0, 1.0), 4)
    assert {profiles[i] for i in (3, 4, 5)} == {(((8, 1),), ((1, 8),))}  # the least there is


@pytest.mark.parametrize("bits", [0.5, 2.0, 3.7])
def test_one_code_of_keys_and_values_has_the_budget_of_both(bits):
    k, v = spectra()
    both = np.sort(np.concatenate([k, v], axis=1))[:, ::-1]
    one, apart = (allocate(sides, (bits, bits), 4, True, k.size) for sides in ((both, both[:, :0]), (k, v)))
    assert all(of_values == () and dict(runs)[8] >= WIDE_OF_BOTH for runs, of_values in one)
    assert 0.93 * bits <= sum(map(bits_of, one)) / both.size <= bits
    errors = [sum(error_of(both[i], runs) for i, (runs, _) in enumerate(one)),
              sum(error_of(k[i], own) + error_of(v[i], other) for i, (own, other) in enumerate(apart))]
    assert errors[0] < 1.1 * errors[1]  # the same components, but for which layers share a profile
    rungs = [sum(map(bits_of, rung)) for rung in ladder((both, both[:, :0]), bits, 4, k.size)]
    assert rungs == sorted(rungs, reverse=True) and rungs[0] <= bits * both.size
