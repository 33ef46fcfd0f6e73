"""Chunks by the Triton kernels, interpreted, against float64 over rebuilt tokens, and in a decoded step against XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention
from kernel_cases import check, rotated
from steps_by_backend import steps_by_backend

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels import dispatch, gpu_grid
from lowrank_kv_jax.pallas_kernels.chunked_attention import chunked_attention, gpu_triton
from lowrank_kv_jax.pallas_kernels.dispatch import Slower
from lowrank_kv_jax.pallas_kernels.expanded_values import gpu_triton as expanded
from lowrank_kv_jax.storage.backend import OVERRIDE
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.chunk_bases import store_bases
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import read_tokens, store_tokens

K, C, D, SCALE, TAIL = 2, 4, 32, 0.3, 20
LENGTHS = np.array([315, 150, 0], np.int32)
TAILS = np.array([17, 0, 0], np.int32)
LAST = 200000  # position of the queries


def owners(page):
    """Pages of chunks: the second row has one that no page of its tokens has yet, and all pages beyond the length are
    stale, the third row's among them."""
    pages = 384 // page
    first = [0] * (128 // page) + [1] * (64 // page) + [3] * (pages - 192 // page)
    second = [0] * (128 // page) + [1] * (64 // page) + [0] * (pages - 192 // page)
    return np.array([first, second, [0] * pages], np.int32)


def there(size, lengths):
    return np.arange(size) < lengths[:, None]


def inputs(dtype, bits, page, groups, each, queries, window=None, before=True, stale=np.nan):
    """The op, exact tokens beside, and what is attended without and with them: NaN in slots that are not there, and
    `stale` numbers in a basis that is not."""
    rng, rows, size = np.random.default_rng(0), len(LENGTHS), 384
    rope, ranks = RopeSpec(10000.0, D) if before else None, (16, 24)
    owner, held = owners(page), there(size, LENGTHS)
    codes = [rng.normal(size=(rows, groups, size, r)) * held[:, None, :, None] for r in ranks]
    kept = [store_tokens(jnp.asarray(x, jnp.float32), bits, dtype) if bits else jnp.asarray(x, dtype) for x in codes]
    codes = [np.asarray(read_tokens(x) if bits else x, np.float64) for x in kept]
    if not bits:
        kept = [jnp.asarray(np.where(held[:, None, :, None], np.asarray(x), np.nan), dtype) for x in kept]
    bases = [np.asarray(jnp.asarray(rng.normal(size=(rows, C, groups, K // groups * D, r)) / r**0.5, dtype), np.float64)
             for r in ranks]
    of = np.repeat(owner, page, axis=1)[:, :, None, None, None]
    keys, values = (np.einsum("bjsr,bsjwr->bsjw", x, np.take_along_axis(u, of, axis=1)).reshape(rows, size, K, D)
                    for x, u in zip(codes, bases, strict=True))
    runs = Runs(jnp.asarray([[0, 140]] * rows), jnp.asarray([[4, 100000]] * rows))
    positions = np.asarray(runs.at(jnp.arange(size)))
    keys = rotated(keys, positions, rope) if before else keys
    bases[1][:, 2] = stale  # of no page
    q = jnp.asarray(rng.normal(size=(rows, queries, K * each, D)), dtype)
    exact = [jnp.asarray(np.where(there(TAIL, TAILS)[:, None, :, None], rng.normal(size=(rows, K, TAIL, D)), np.nan), dtype)
             for _ in range(2)]
    behind = jnp.full((rows, queries), LAST)
    none = jnp.zeros((rows, 2), jnp.int32)
    beside = Beside(q, CachedTokens(*exact, jnp.asarray(TAILS), Runs(none, none)), behind, False)
    wide = [np.concatenate([x, np.nan_to_num(np.asarray(y, np.float64)).swapaxes(1, 2)], axis=1)
            for x, y in zip((keys, values), exact, strict=True)]
    seen = held & (positions > LAST - window) if window else held
    mask = [seen, there(TAIL, TAILS)]
    asked = np.asarray(q, np.float64)
    oracles = [softmax_attention(asked, *(x[:, : m.shape[1]] for x in wide), m[:, None], SCALE)
               for m in (mask[0], np.concatenate(mask, axis=1))]
    stored = [store_bases(jnp.asarray(u), dtype, by_rows) for u, by_rows in zip(bases, (False, True), strict=True)]
    tokens = CachedTokens(*kept, jnp.asarray(LENGTHS), runs)
    attend = functools.partial(chunked_attention, page=page, rope=rope, kv_heads=K, scale=SCALE, window=window,
                               q_positions=behind, backend="triton")
    return functools.partial(attend, q, tokens, jnp.asarray(owner), *stored), beside, oracles


def left_to_xla(warned):
    return [str(w.message) for w in warned if "chunked_attention runs on XLA" in str(w.message)]


@pytest.mark.parametrize("dtype, bits, page, groups, each, queries, window, cores, before", [
    pytest.param("float32", None, 16, 2, 3, 1, None, 132, True, marks=pytest.mark.newest),  # pages of less than a tile
    ("bfloat16", None, 64, 1, 1, 1, LAST - 100200, 132, True),  # one basis for both heads; begins within a chunk
    pytest.param("float32", 8, 128, 2, 1, 1, None, 1, True, marks=pytest.mark.slow),  # of one split
    pytest.param("float32", None, 64, 2, 2, 3, None, 132, True, marks=pytest.mark.slow),
    ("float32", None, 64, 1, 2, 3, None, 1, False),
    ("bfloat16", 8, 128, 2, 3, 1, None, 132, False),
])
def test_chunks_by_kernel(dtype, bits, page, groups, each, queries, window, cores, before, monkeypatch, recwarn):
    """Of three rows one has no exact token, and another nothing at all."""
    monkeypatch.setattr(gpu_triton, "TOGETHER", 4)
    monkeypatch.setattr(gpu_grid, "CORES", cores)
    monkeypatch.setenv(OVERRIDE, "triton")
    attend, beside, (alone, both) = inputs(dtype, bits, page, groups, each, queries, window, before)
    check(jax.jit(lambda: attend(beside=beside))(), both, dtype)
    if queries > 1:
        check(jax.jit(attend)(), alone, dtype)
    assert not left_to_xla(recwarn)


def test_wide_chunks_after_rope_are_those_of_the_coefficients_kernel(monkeypatch):
    monkeypatch.setattr(gpu_triton, "MOST_REBUILT", 15)
    monkeypatch.setenv(OVERRIDE, "triton")
    attend, beside, (_, both) = inputs("float32", None, 128, 2, 1, 1, before=False, stale=0.0)
    check(jax.jit(lambda: attend(beside=beside))(), both)


def test_many_exact_tokens_come_as_their_partial(monkeypatch):
    monkeypatch.setattr(expanded, "FEW_SLOTS", TAIL - 1)
    monkeypatch.setenv(OVERRIDE, "triton")
    attend, beside, (_, both) = inputs("float32", None, 128, 2, 1, 1)
    check(jax.jit(lambda: attend(beside=beside))(), both)


def test_a_decoded_step_is_that_of_xla(monkeypatch, recwarn):
    """With several chunks, and bases that no chunk has taken yet."""
    dispatch.warn_anew()
    found, called = steps_by_backend("osp:rank=6,sinks=4,recent=8,chunk_length=16,min_chunk=8", monkeypatch,
                                     (gpu_triton, "chunked_attention"))
    assert called and not left_to_xla(recwarn)
    np.testing.assert_allclose(found["triton"][2], found["xla"][2], atol=2e-4)


def test_wide_chunks_before_rope_are_left_to_xla():
    attend, _, _ = inputs("float32", None, 64, 2, 1, 1)
    q, tokens, *rest = attend.args
    wide = tokens._replace(keys=jnp.zeros((*tokens.keys.shape[:3], 257)))
    options = {name: x for name, x in attend.keywords.items() if name != "backend"}
    with pytest.raises(Slower, match="257 components"):
        gpu_triton.chunked_attention(q, wide, *rest, **options, interpret=True)
