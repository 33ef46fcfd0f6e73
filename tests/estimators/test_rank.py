"""Ranks from fields and from energy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_kv_jax.codecs.layer_groups import split_rank
from lowrank_kv_jax.estimators.rank import rank_for_energy, rank_multiple, resolve_rank


@pytest.mark.parametrize(
    "value, width, rank",
    [
        (1, 64, 1),
        (64, 64, 64),
        (1.0, 64, 64),
        (0.5, 64, 32),
        (38, 64, 38),  # given, so kept
        (0.001, 64, 8),
        (0.001, 12, 1),
        (0.6, 12, 7),
        (0.6, 48, 29),
        (0.6, 64, 40),
        (0.6, 128, 80),
        (0.8, 128, 96),
        (0.25, 192, 48),
        (0.125, 192, 24),
        (0.13, 192, 32),
        (0.01, 192, 16),
        (0.99, 100, 96),
        (0.99, 98, 96),
        (1.0, 98, 98),
        (0.1, 65, 8),
        (np.int64(3), 8, 3),
    ],
)
def test_ints_count_columns_and_floats_are_fractions(value, width, rank):
    assert resolve_rank("rank", value, width) == rank


@given(st.floats(1e-3, 1.0), st.integers(1, 5000))
def test_fractions_are_whole_loads_within_the_width_and_near_what_was_asked(value, width):
    rank = resolve_rank("rank", value, width)
    asked = rank % 8 == 0 and abs(rank - value * width) < 1e-5
    assert 1 <= rank <= width and (rank == width or rank % rank_multiple(width) == 0 or asked)
    assert abs(rank - value * width) <= max(rank_multiple(width) / 2, rank_multiple(width) - value * width)


@given(st.floats(1e-3, 1.0), st.integers(64, 5000), st.floats(0.3, 3.0))
def test_the_two_ranks_of_a_fraction_are_whole_loads_and_keep_its_sum(value, width, ratio):
    mean = resolve_rank("rank", value, width)
    k, v = split_rank(mean, width, ratio, 8)
    assert 1 <= k <= width and 1 <= v <= width
    assert all(rank == width or rank % 8 == 0 for rank in (k, v))
    if mean < width and 8 < min(k, v) and max(k, v) < width:
        assert k + v == 2 * mean and abs(v - 2 * mean * ratio / (1 + ratio)) <= 4


@pytest.mark.parametrize(
    "value, error",
    [
        (0, ValueError),
        (-1, ValueError),
        (65, ValueError),
        (0.0, ValueError),
        (1.01, ValueError),
        (-0.5, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (True, TypeError),
        ("8", TypeError),
        (None, TypeError),
    ],
)
def test_other_ranks_are_refused_by_name(value, error):
    with pytest.raises(error, match="rank_v="):
        resolve_rank("rank_v", value, 64)


@given(st.integers(1, 12), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_energy_rank_is_the_smallest_that_suffices_in_every_head(width, energy, seed):
    values = np.sort(np.random.default_rng(seed).exponential(size=(3, width)) ** 3, axis=-1)[:, ::-1]
    rank = rank_for_energy(values, energy)
    share = np.cumsum(values, axis=-1) / values.sum(-1, keepdims=True)
    assert np.all(share[:, rank - 1] >= energy * (1 - 1e-9))
    if rank > 1:
        assert np.any(share[:, rank - 2] < energy)


def test_energy_ranks_are_rounded_up_to_whole_loads():
    values = np.ones((2, 128))
    assert rank_for_energy(values, 0.6) == 80 and rank_for_energy(values, 1.0) == 128
    assert rank_for_energy(values[:, :64], 0.6) == 40 and rank_for_energy(values[:, :100], 1.0) == 100


def test_energy_of_degenerate_spectra():
    assert rank_for_energy(np.array([3.0, 0.0, 0.0]), 1.0) == 1
    assert rank_for_energy(np.array([1.0, 1.0, -1e-18]), 1.0) == 2
    assert rank_for_energy(np.zeros(4), 0.9) in (1, 4)
    for energy in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="energy="):
            rank_for_energy(np.ones(2), energy)
