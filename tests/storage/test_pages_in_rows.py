"""Pages of tokens in rows: the same tokens as a gather of their slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.pages_in_rows import ExactPages, FlatExactPages, FlatPages, PagesInRows, in_pages


@pytest.mark.parametrize(
    "width, page, kind, stored",
    [(128, 8, "exact", ExactPages), (16, 16, "coefficients", FlatPages), (256, 16, "coefficients", PagesInRows),
     (48, 8, "exact", FlatExactPages)],
)
def test_chosen_pages_are_the_tokens_of_their_slots(width, page, kind, stored):
    """Two stored heads serve four units; a page that is none may hold anything."""
    rng, pages = np.random.default_rng(0), 9
    x = rng.normal(size=(2, 2, pages * page, width)).astype(np.float32)
    held = in_pages(jnp.asarray(x), page, kind)
    assert type(held) is stored and held.shape == x.shape and held.dtype == x.dtype
    np.testing.assert_array_equal(held.in_rows(), x)
    np.testing.assert_array_equal(held.read_block(page + 1, 5), x[:, :, page + 1 : page + 6])
    chosen = np.sort(np.stack([[rng.choice(pages, 3, replace=False) for _ in range(4)] for _ in range(2)]))
    chosen[1, 2, 2] = pages
    found = jax.jit(lambda held, chosen: slice_block(held.of_pages(chosen), 0, 3 * page))(held, chosen)
    for row in range(2):
        for unit in range(4):
            for place, at in enumerate(chosen[row, unit]):
                if at < pages:
                    own = found[row, unit, place * page : (place + 1) * page]
                    np.testing.assert_array_equal(own, x[row, unit // 2, at * page : (at + 1) * page])


@pytest.mark.slow
def test_a_part_of_the_chosen_pages():
    x = np.arange(2 * 4 * 8 * 128, dtype=np.float32).reshape(1, 2, 32, 128)
    held = in_pages(jnp.asarray(x), 8, "exact").of_pages(jnp.asarray([[[0, 2], [1, 3]]]))
    assert held.shape == (1, 2, 16, 128)
    whole = held.read_block(0, 16)
    np.testing.assert_array_equal(whole[0, 1], x[0, 1, np.r_[8:16, 24:32]])
    np.testing.assert_array_equal(held.read_block(5, 7), whole[:, :, 5:12])


def test_what_no_register_fits_is_left_to_other_layouts():
    """No channels; pages that are no part of the tokens; a page of no whole registers, or of too many numbers."""
    for shape, page in (((1, 1, 64, 0), 8), ((1, 1, 60, 128), 8), ((1, 1, 64, 20), 8), ((1, 1, 64, 816), 32)):
        assert in_pages(jnp.zeros(shape), page, "exact") is None
