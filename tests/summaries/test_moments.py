"""Moment statistics: exactness, algebra and edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN
from hypothesis import given
from hypothesis import strategies as st

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.fixed_point import fixed_point
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.summaries import moments
from lowrank_kv_jax.summaries.component import Summary
from lowrank_kv_jax.summaries.moments import affine_model, combine, empty_moments
from lowrank_kv_jax.testing import PROMISES

in_16_bits = jax.jit(fixed_point)
update, partial = jax.jit(moments.update), jax.jit(moments.partial, static_argnums=2)
K, D = 2, 8
SCALE = D**-0.5


def tokens(count, seed=0, scale=1.0):
    k, v = scale * np.random.default_rng(seed).normal(size=(2, 1, K, count, D))
    return jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)


def summary_of(k, v, order="1", dtype=jnp.float32):
    return update(empty_moments(1, K, D, order, dtype), k, v, jnp.ones(k.shape[:3]))


def attention(q, k, v):
    """Exact partial over `[1, K, S, D]` in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.reshape(1, q.shape[1], K, -1, D)
    s = np.einsum("btkgd,bksd->btkgs", groups, k) * SCALE
    lse = np.logaddexp.reduce(s, axis=-1)
    out = np.einsum("btkgs,bksd->btkgd", np.exp(s - lse[..., None]), v)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def queries(seed=1, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=(1, 3, 4, D)), jnp.float32)


SIZE = 24  # of what is drawn: one shape, compiled once


def first(count):
    return jnp.broadcast_to(jnp.arange(SIZE) < count, (1, K, SIZE))


@given(st.integers(1, SIZE), st.sampled_from(["0", "1", "gaussian"]), st.integers(0, 9))
def test_equal_keys_are_corrected_exactly(count, order, seed):
    """With one key, softmax over the evicted is uniform: v_bar and n exp(s), whatever the values."""
    k, v = tokens(SIZE, seed)
    k = jnp.broadcast_to(k[:, :, :1], k.shape)
    q = queries(seed)
    got = partial(update(empty_moments(1, K, D, order), k, v, first(count)), q, SCALE)
    out, lse = attention(q, k[:, :, :count], v[:, :, :count])
    np.testing.assert_allclose(got.out, out, atol=2e-5)
    np.testing.assert_allclose(got.lse, lse, atol=2e-5)


@given(st.permutations(range(SIZE)), st.integers(0, SIZE), st.integers(0, 9))
def test_order_of_eviction_does_not_matter_and_parts_combine(order, cut, seed):
    k, v = tokens(SIZE, seed)
    order, nothing = jnp.asarray(order), empty_moments(1, K, D, "gaussian")
    head, tail = update(nothing, k, v, first(cut)), update(nothing, k, v, ~first(cut))
    whole = update(nothing, k, v, first(SIZE))
    for other in (
        update(nothing, k[:, :, order], v[:, :, order], first(SIZE)), combine(head, tail),
        update(tail, k, v, first(cut)),
    ):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), whole, other)


def test_small_spread_is_second_order_and_jensen_is_a_lower_bound():
    """Halving the spread of the logits quarters the error (equations 29 and 33)."""
    k, v = tokens(50)
    errors = []
    for spread in (0.4, 0.2, 0.1):
        got, (out, lse) = partial(summary_of(spread * k, v), queries(), SCALE), attention(queries(), spread * k, v)
        errors.append((np.abs(got.out - out).max(), np.abs(got.lse - lse).max()))
        assert (got.lse <= lse + 1e-5).all()
    for a, b in zip(errors, errors[1:], strict=False):
        assert a[0] / b[0] > 3 and a[1] / b[1] > 3


def test_gaussian_is_exact_for_jointly_gaussian_keys_and_values():
    rng = np.random.default_rng(0)
    k = rng.normal(size=(1, K, 20000, D))
    v = k @ rng.normal(size=(D, D)) + 0.1 * rng.normal(size=k.shape)
    k, v = jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)
    q = queries()
    out, lse = attention(q, k, v)
    jensen, gaussian = (partial(summary_of(k, v, order), q, SCALE) for order in ("1", "gaussian"))
    assert np.abs(gaussian.lse - lse).max() < 0.03 < 0.2 < np.abs(jensen.lse - lse).max()
    assert np.linalg.norm(gaussian.out - out) < 0.05 * np.linalg.norm(out)


@pytest.mark.parametrize("order", ["0", "1", "gaussian"])
def test_nothing_evicted_changes_nothing(order):
    got = partial(empty_moments(1, K, D, order), queries(), SCALE)
    assert (got.out == 0).all() and np.isneginf(got.lse).all()
    other = AttnPartial(jnp.ones_like(got.out), jnp.zeros_like(got.lse))
    for parts in ([got, other], [other, got]):
        np.testing.assert_array_equal(merge(parts).out, other.out)
    ignored = update(empty_moments(1, K, D, order), jnp.full((1, K, 3, D), jnp.nan), jnp.zeros((1, K, 3, D)),
                     jnp.zeros((1, K, 3)))
    assert all((x == 0).all() for x in jax.tree.leaves(ignored))


@pytest.mark.parametrize("order", ["0", "1", "gaussian"])
def test_a_single_evicted_token_is_exact(order):
    k, v = tokens(1)
    got, (out, lse) = partial(summary_of(k, v, order), queries(), SCALE), attention(queries(), k, v)
    np.testing.assert_allclose(got.out, out, atol=1e-5)
    np.testing.assert_allclose(got.lse, lse, atol=1e-5)


def test_heads_count_by_themselves():
    """One head may have evicted where the other has not."""
    k, v = tokens(4)
    weight = jnp.asarray([[[1.0, 0, 1, 0], [0, 0, 0, 0]]])
    got = partial(update(empty_moments(1, K, D, "1"), k, v, weight), queries(), SCALE)
    assert np.isneginf(got.lse[:, :, 2:]).all() and np.isfinite(got.lse[:, :, :2]).all()
    _, lse = attention(queries(), k[:, :, ::2].at[:, 1].set(0), v[:, :, ::2])
    assert (got.lse[:, :, :2] <= lse[:, :, :2] + 1e-5).all()


def test_noise_in_the_covariance_is_clamped():
    """Equation 37's neighbour in C.2: entries of S~ below 1e-6 become zero, larger ones stay."""
    k = jnp.full((1, K, 3, D), 2e3) + jnp.asarray([0.0, 1e-4, -1e-4])[:, None]
    v = jnp.full((1, K, 3, D), 1.0)
    _, slope = affine_model(summary_of(k, v), SCALE)
    assert (slope == 0).all()
    k, v = tokens(3)
    _, slope = affine_model(summary_of(k, v), SCALE)
    assert (slope != 0).any()
    _, tiny = affine_model(summary_of(1e-4 * k, 1e-4 * v), SCALE)
    assert (tiny == 0).all()


def test_large_logits_do_not_overflow():
    k, v = tokens(5, scale=300.0)
    for order in ("0", "1", "gaussian"):
        got = partial(summary_of(k, v, order), queries(scale=30.0), SCALE)
        assert np.isfinite(got.lse).all() and np.isfinite(got.out).all()
        _, most = attention(queries(scale=30.0), k, v)
        limit = np.log(5) + np.linalg.norm(queries(scale=30.0), axis=-1) * np.linalg.norm(k, axis=-1).max() * SCALE
        assert (got.lse <= limit * (1 + 1e-5) + 1e-3).all()


@pytest.mark.parametrize("order, floats", [("0", 2 * D + 1), ("1", D * D + 2 * D + 1), ("gaussian", 2 * D * D + 2 * D + 2)])
def test_bytes_of_the_statistics(order, floats):
    summary = empty_moments(1, K, D, order)
    assert sum(x.nbytes for _, x, _ in walk(summary)) == 4 * K * floats
    assert {info.kind for _, _, info in walk(summary)} == {"moments"}
    half = empty_moments(1, K, D, order, jnp.bfloat16)
    assert sum(x.nbytes for x in jax.tree.leaves(half)) < 0.6 * 4 * K * floats
    k, v = tokens(20)
    np.testing.assert_allclose(
        partial(summary_of(k, v, order, jnp.bfloat16), queries(), SCALE).out,
        partial(summary_of(k, v, order), queries(), SCALE).out, atol=0.1)


@pytest.mark.parametrize("dtype, atol", [(jnp.bfloat16, 0.03), (jnp.float16, 0.008), (jnp.int16, 0.001)])
def test_16_bits_hold_after_many_evictions(dtype, atol):
    """A sum in bfloat16 no longer grows after some hundred tokens; a mean has nothing to grow to."""
    k, v = tokens(4096)
    blocks = [(x + 1.0).reshape(1, K, -1, 32, D).transpose(2, 0, 1, 3, 4) for x in (k, v)]  # means that are not zero

    def evict(moments_of, block):
        return moments.update(moments_of, *block, jnp.ones(block[0].shape[:3])), None

    run = jax.jit(lambda start: jax.lax.scan(evict, start, tuple(blocks))[0])
    exact, rounded = (run(empty_moments(1, K, D, "gaussian", own)) for own in (jnp.float32, dtype))
    assert (rounded.count == 4096).all() and rounded.k_mean.dtype == (jnp.float32 if dtype == jnp.int16 else dtype)
    found, wanted = (partial(own, queries(), SCALE) for own in (rounded, exact))
    np.testing.assert_allclose(found.lse, wanted.lse, atol=atol)
    np.testing.assert_allclose(found.out, wanted.out, atol=atol)


def test_covariances_in_int16_take_16_bits_and_an_exponent_a_row():
    held, wide = (empty_moments(1, K, D, "gaussian", own) for own in (jnp.int16, jnp.float32))
    sizes = [sum(x.nbytes for _, x, _ in walk(own)) for own in (held, wide)]
    assert sizes[1] - sizes[0] == 2 * K * (2 * D * D - D)
    assert {info.kind for _, _, info in walk(held)} == {"moments"}


@pytest.mark.parametrize("standing", [True, False])
def test_moments_are_of_the_dtype_that_was_asked_for(standing):
    """Also where they say what may go and stand for nothing."""
    layout = make_layout(PLAIN, 1, 64, 96, 32, jnp.float32)
    spec = f"momentkv:budget=24,recent=8,nc={standing},moments_dtype=float16".lower()
    (moments,) = abstract_cache(parse_method(spec), layout).groups[0].gone
    assert moments.k_mean.dtype == moments.covariance.dtype == jnp.float16


@pytest.mark.slow
def test_a_cache_with_covariances_in_int16_keeps_every_promise():
    for promise in PROMISES:
        promise(parse_method("momentkv:budget=24,recent=8,moments_dtype=int16"))


@given(st.integers(0, 99), st.floats(-30, 30))
def test_fixed_point_errs_by_little_of_a_rows_largest_and_stores_again_what_it_read(seed, power):
    x = np.random.default_rng(seed).normal(size=(1, 2, 3, 5)) * 10.0**power
    x[0, 1, 1] = 0.0
    held = in_16_bits(jnp.asarray(x, jnp.float32))
    wide = np.asarray(held.widened(), np.float64)
    assert (np.abs(wide - x) <= np.abs(x).max(-1, keepdims=True) * 2.0**-15 * 1.001).all() and not wide[0, 1, 1].any()
    again = in_16_bits(held.widened())
    np.testing.assert_array_equal(again.widened(), held.widened())


@pytest.mark.parametrize("fields, message", [
    ({"order": "2"}, "order='2'"), ({"dtype": "float64"}, "dtype='float64'"),
])
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Summary(**fields)
