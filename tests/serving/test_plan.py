"""Rows within a budget, widths, bytes as text, prefixes on a shelf; draws of rows that each ask for their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.generation.sampling import Sampler, sample
from lowrank_kv_jax.serving.plan import parse_bytes, rows_within, widths_of
from lowrank_kv_jax.serving.sampling import Draws, sample_rows
from lowrank_kv_jax.serving.shelf import Shelf


def test_bytes_are_a_number_or_a_text():
    assert [parse_bytes("memory", text) for text in (7, "7B", "1.5KiB", "256 MiB", "2GB")] == [7, 7, 1536, 2**28, 2 * 10**9]
    for wrong in ("256", "MiB", "1TiB", "-1MiB", "nan MiB", 0, -5, 2.5, True, None, "0B", "9" * 40 + "B"):
        with pytest.raises(ValueError, match="^memory="):
            parse_bytes("memory", wrong)


def test_rows_fill_the_budget_and_long_ones_are_not_forgotten():
    assert rows_within([10], 99, most=64) == ((9, 0),)
    assert rows_within([10, 20, 40], 100, most=64) == ((2, 0), (2, 0), (1, 0))  # 70, then 20 and 10 more
    assert rows_within([10, 20, 40], 10**6, most=3) == ((3, 0),) * 3
    assert rows_within([10], 99, most=4) == ((4, 0),)
    assert rows_within([10], 39, most=64, prefixes=2) == ((3, 0),)
    assert rows_within([10], 99, most=64, prefixes=2) == ((7, 2),)
    assert rows_within([10], 10**6, most=4, prefixes=2) == ((4, 2),)  # all that were asked for, however few the slots
    assert rows_within([10, 20], 10**6, most=1, prefixes=3) == ((1, 3),) * 2
    assert [rows_within([10], memory, most=4, prefixes=2) for memory in (30, 40, 50)] == [((3, 0),), ((3, 1),), ((4, 1),)]
    assert rows_within([10], 99, most=64, prefixes=1, step=2) == ((6, 2),)
    assert rows_within([100], 10**4, most=3, prefixes=1, step=2) == ((4, 2),)  # rows of a pool are whole steps
    with pytest.raises(ValueError, match="memory: 69 bytes are left for rows, one of each length takes 70; give 1 more"):
        rows_within([10, 20, 40], 69, most=64)


@pytest.mark.parametrize("prompt", (1, 40, 64, 100, 1024, 4096))
def test_a_prompt_is_padded_by_a_third_at_the_most(prompt):
    widths = widths_of(prompt)
    assert widths[-1] == prompt and list(widths) == sorted(set(widths)) and len(widths) <= 14
    for tokens in range(min(64, prompt), prompt + 1):
        assert min(width for width in widths if width >= tokens) <= max(64, 1.5 * tokens + 1)


def test_the_prefix_that_was_asked_for_longest_ago_makes_room():
    shelf = Shelf(2)
    first, second = shelf.place((1,)), shelf.place((2,))
    assert {first, second} == {0, 1} and shelf.find((1,)) == first
    assert shelf.place((3,)) == second and shelf.find((2,)) is None and shelf.find((1,)) == first
    assert Shelf(0).place((1,)) is None


def test_every_row_draws_as_it_would_alone():
    samplers = (Sampler(), Sampler(1.0), Sampler(2.0, None, 0.7), Sampler(1.5, 20, 0.9), Sampler(0.0, 3, 0.1))
    rows = len(samplers)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 50)) * 3, jnp.float32)
    seeds = jnp.arange(rows, dtype=jnp.uint32)
    columns = zip(*((s.temperature, s.top_k or 50, s.top_p) for s in samplers), strict=True)
    draws = Draws(seeds, *map(jnp.asarray, columns))

    @jax.jit
    def both(step):
        keys = jax.vmap(jax.random.key)(seeds)
        alone = [sample(s, logits[i : i + 1], keys[i : i + 1], step[i : i + 1])[0] for i, s in enumerate(samplers)]
        return sample_rows(draws, logits, step), jnp.stack(alone)

    for turn in range(40):
        np.testing.assert_array_equal(*both(jnp.arange(rows) + turn))
