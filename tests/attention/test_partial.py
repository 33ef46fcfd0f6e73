"""The merge of partials is softmax attention over the union, whatever the split."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import empty_partial, softmax_attention
from hypothesis import given
from hypothesis import strategies as st

from lowrank_kv_jax.attention.partial import AttnPartial, merge


def partial_of(scores, values):
    """The partial of tokens with `scores` `[S]` and `values` `[S, D]`: one row, one query, one head."""
    keys, values = scores[None, :, None, None], values[None, :, None, :]
    out, lse = softmax_attention(np.ones((1, 1, 1, 1)), keys, values, np.ones((1, 1, len(scores)), bool), 1.0)
    return AttnPartial(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))


splits = st.tuples(
    st.integers(1, 20),
    st.lists(st.integers(0, 20), max_size=5),
    st.sampled_from([1.0, 30.0, 3000.0]),
    st.integers(0, 2**16),
)


@given(splits)
def test_any_split_merges_to_attention_over_all(case):
    size, cuts, spread, seed = case
    rng = np.random.default_rng(seed)
    scores, values = (rng.normal(size=size) * spread).astype(np.float32), rng.normal(size=(size, 3))
    edges = [0, *sorted(min(c, size) for c in cuts), size]  # repeated cuts make empty parts
    parts = [partial_of(scores[a:b], values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    merged, whole = merge(parts), partial_of(scores, values)
    # lse is float32: at logits of thousands its last bit is worth 2e-4, which moves the weights by as much
    tolerance = 1e-5 + 3e-7 * float(np.abs(scores).max())
    np.testing.assert_allclose(merged.out, whole.out, atol=4 * tolerance)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=tolerance, rtol=3e-7)


@given(splits)
def test_merge_is_associative_and_commutative(case):
    _, _, spread, seed = case
    rng = np.random.default_rng(seed)
    a, b, c = (
        partial_of((rng.normal(size=4) * min(spread, 30.0)).astype(np.float32), rng.normal(size=(4, 3)))
        for _ in range(3)
    )
    left, right, turned = merge([merge([a, b]), c]), merge([a, merge([b, c])]), merge([c, a, b])
    for other in (right, turned):
        np.testing.assert_allclose(left.out, other.out, atol=5e-5)
        np.testing.assert_allclose(left.lse, other.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e30])
def test_empty_parts_change_nothing_and_never_give_nan(spread):
    rng = np.random.default_rng(0)
    part = AttnPartial(
        jnp.asarray(rng.normal(size=(2, 3, 4, 5)), jnp.float32),
        jnp.asarray(rng.normal(size=(2, 3, 4)) * spread, jnp.float32),
    )
    empty = empty_partial(2, 3, 4, 5)
    for parts in ([empty, part], [part, empty], [empty, part, empty]):
        merged = merge(parts)
        np.testing.assert_array_equal(merged.out, part.out)
        np.testing.assert_array_equal(merged.lse, part.lse)
    nothing = merge([empty, empty])
    assert not np.any(nothing.out) and np.all(np.isneginf(nothing.lse))


def test_a_row_may_be_empty_in_one_part_only():
    empty, part = empty_partial(2, 1, 1, 3), AttnPartial(jnp.ones((2, 1, 1, 3)), jnp.zeros((2, 1, 1)))
    mixed = AttnPartial(part.out.at[0].set(0.0), part.lse.at[0].set(-jnp.inf))
    for merged in (merge([mixed, part]), merge([part, mixed])):
        np.testing.assert_allclose(merged.out, 1.0)
        np.testing.assert_allclose(merged.lse[:, 0, 0], [0.0, np.log(2)], atol=1e-6)
    assert np.isneginf(merge([mixed, empty]).lse[0]).all()


def test_a_merge_by_kv_head_is_the_merge():
    rng = np.random.default_rng(3)
    shapes = ((2, 3, 6, 4), (2, 3, 6))
    parts = [AttnPartial(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)) for _ in range(2)]
    for found, expected in zip(merge(parts, kv_heads=3), merge(parts), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_merging_overlapping_parts_counts_tokens_twice():
    part = AttnPartial(jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1)))
    np.testing.assert_allclose(merge([part, part]).lse, np.log(2), atol=1e-6)


def test_merge_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one partial"):
        merge([])
