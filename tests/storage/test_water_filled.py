"""Packed components of several widths against a float64 oracle, and as a segment holds them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.segments import coded
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import map_tokens
from lowrank_kv_jax.storage.water_filled import (
    MANY,
    WIDTHS,
    WORD,
    bytes_of,
    components_of,
    empty_water_filled,
    in_words,
    pack,
    unpack,
)

RUNS = ((8, 3), (4, 4), (2, 5), (1, 11))


def rounded(x, runs):
    """float64: the middle of the step that holds each number, or of the last one."""
    out, begin = [], 0
    for bits, count in runs:
        half = 2.0 ** (bits - 1)
        out.append(np.clip(np.floor(np.asarray(x[..., begin : begin + count], np.float64)), -half, half - 1) + 0.5)
        begin += count
    return np.concatenate(out, axis=-1)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 20


@functools.partial(jax.jit, static_argnums=1)
def round_trip(x, runs):
    packed = pack(x, runs)
    wide = unpack(packed, runs)
    return packed, wide, pack(wide, runs)


@given(st.dictionaries(st.sampled_from((8, 4, 2, 1)), st.integers(1, 21), min_size=1), st.integers(0, 2**16))
@settings(max_examples=12, deadline=None)
def test_any_runs_hold_the_middle_of_each_step_in_their_bits(counts, seed):
    runs = tuple(sorted(counts.items(), reverse=True))
    x = numbers(3, 2, components_of(runs), seed=seed)
    packed, wide, again = round_trip(x, runs)
    assert packed.dtype == jnp.uint8 and packed.shape == (3, 2, bytes_of(runs))
    assert bytes_of(runs) == sum(int(np.ceil(count * bits / 8)) for bits, count in runs)
    np.testing.assert_array_equal(wide, rounded(x, runs))
    np.testing.assert_array_equal(again, packed)  # what was read is stored again as it was


@given(st.dictionaries(st.sampled_from(WIDTHS), st.integers(1, 90), min_size=1), st.integers(0, 60))
def test_whole_words_take_a_few_bits_more_and_no_component_fewer(counts, more):
    """Unless there are few bytes, or nothing is left to widen."""
    runs = tuple(sorted(counts.items(), reverse=True))
    most = components_of(runs) + more
    found = in_words(runs, most)
    assert components_of(runs) <= components_of(found) <= most and list(found) == sorted(found, reverse=True)
    each, before = (np.repeat(*np.array(own).T) for own in (found, runs))
    assert (each[: len(before)] >= before).all()
    if bytes_of(runs) < MANY:
        assert found == runs
    else:
        assert 0 <= bytes_of(found) - bytes_of(runs) < WORD
        assert bytes_of(found) % WORD == 0 or found == ((8, most),)


read = jax.jit(lambda x, begin, size: x.read_block(begin, size), static_argnums=(1, 2))


def segment(batch=2, heads=3, size=640, positions=None, runs=RUNS):
    k, v = (empty_water_filled(batch, heads, size, own) for own in (runs, runs[:2]))
    return coded.without_tokens(k, v, positions)


def test_tokens_are_held_appended_and_read_by_blocks():
    """Rows grow at their own pace, also where a block of 512 does not hold the buffer."""
    r, shape = components_of(RUNS), (2, 3, 640)
    x, y = numbers(*shape, r), numbers(*shape, 7, seed=1)
    gaps = jnp.zeros((2, 2), jnp.int32)
    held = jax.jit(coded.hold)(segment(), x[:, :, :500], y[:, :, :500], jnp.array([500, 90]), Runs(gaps, gaps))
    length = np.array([500, 90])
    append = jax.jit(coded.append, donate_argnums=0)
    for counts in ([9, 3], [9, 0], [5, 9]):
        new = [np.stack([a[b, :, n : n + 9] for b, n in enumerate(length)]) for a in (x, y)]
        held = append(held, *map(jnp.asarray, new), jnp.array(counts))
        length = length + counts
    np.testing.assert_array_equal(held.length, length)
    keys, values = (np.asarray(read(side, 0, 640)) for side in (held.k, held.v))
    for row, n in enumerate(length):
        np.testing.assert_array_equal(keys[row, :, :n], rounded(x, RUNS)[row, :, :n])
        np.testing.assert_array_equal(values[row, :, :n], rounded(y, RUNS[:2])[row, :, :n])
    np.testing.assert_array_equal(read(held.k, 300, 90), keys[:, :, 300:390])
    assert held.k.shape == (2, 3, 640, r) and len(jax.tree.leaves(held.k)) == 1
    turned = jax.jit(lambda k, length: map_tokens(k, length, lambda z: -z, jnp.array([True, False])))(held.k, held.length)
    np.testing.assert_array_equal(read(turned, 0, 640)[0, :, : length[0]], -rounded(x, RUNS)[0, :, : length[0]])
    np.testing.assert_array_equal(turned.codes[1], held.k.codes[1])


def test_an_append_writes_in_place():
    held = segment(size=1 << 14)
    new = [jnp.zeros((2, 3, 1, x.shape[3])) for x in (held.k, held.v)]
    program = jax.jit(coded.append, donate_argnums=0).lower(held, *new, jnp.ones(2, jnp.int32)).compile()
    memory, size = program.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(held))
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size / 100


@pytest.mark.parametrize("heads", [1, 3])
def test_tokens_of_packed_heads_need_nothing_more(heads):
    """No token has a scale: slots of several owners lie in one buffer as those of one."""
    owner = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, 1, 20)), axis=-1), jnp.int8)
    where = PerHead(jnp.zeros((2, 1, 20), jnp.int32), owner, 3) if heads == 1 else None
    x, y = numbers(2, heads, 20, components_of(RUNS)), numbers(2, heads, 20, 7)
    held = segment(heads=heads, size=20, positions=where)

    @jax.jit
    def hold_and_change(held, x, y):
        held = coded.hold(held, x, y, jnp.array([20, 7]), held.positions)
        return held, coded.change_tokens(held, "v", lambda z: -z, jnp.array([True, True]))

    held, changed = hold_and_change(held, x, y)
    np.testing.assert_array_equal(read(held.k, 0, 20), rounded(x, RUNS))
    np.testing.assert_array_equal(read(changed, 0, 7), -rounded(y, RUNS[:2])[:, :, :7])
