"""Ranks from fields and from energy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_kv_jax.rank import rank_for_energy, resolve_rank


@pytest.mark.parametrize(
    "value, width, rank",
    [
        (1, 64, 1),
        (64, 64, 64),
        (1.0, 64, 64),
        (0.5, 64, 32),
        (0.001, 64, 1),
        (0.6, 64, 38),
        (np.int64(3), 8, 3),
    ],
)
def test_ints_count_columns_and_floats_are_fractions(value, width, rank):
    assert resolve_rank("rank", value, width) == rank


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


def test_energy_of_degenerate_spectra():
    assert rank_for_energy(np.array([3.0, 0.0, 0.0]), 1.0) == 1
    assert rank_for_energy(np.array([1.0, 1.0, -1e-18]), 1.0) == 2
    assert rank_for_energy(np.zeros(4), 0.9) in (1, 4)
    for energy in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="energy="):
            rank_for_energy(np.ones(2), energy)
