"""What is stored where: exact and coded parts together against a plain list of tokens.

Tokens are numbered by their position and the number is written into their keys and values, so that a token in
the wrong place, twice, or with the wrong position shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.codecs.principal import Bases
from lowrank_kv_jax.method import REGISTRY, Layout, Place
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.positions import PerHead, Runs, owner_dtype

B, D = 2, 2
SPEC = AttentionSpec(
    num_layers=1, q_heads=1, kv_heads=1, head_dim=D, rope=None, context=4096, windows=(None,)
)
IDENTITY = Bases(jnp.eye(D)[None], jnp.eye(D)[None])

compress = jax.jit(
    lambda m, layout, taps, n: machine_of(m).compress(layout, IDENTITY, machine_of(m).init(layout, IDENTITY), (taps,), n),
    static_argnums=(0, 1),
)
append = jax.jit(
    lambda m, layout, s, taps, n: machine_of(m).append(layout, IDENTITY, s, taps, n, None, Place()), static_argnums=(0, 1)
)
refresh = jax.jit(lambda m, layout, s: machine_of(m).refresh(layout, IDENTITY, s), static_argnums=(0, 1))


def read(segment):
    """Keys, values and positions of all slots."""
    keys, values = (slice_block(x, 0, x.shape[2]) for x in (segment.k, segment.v))
    return keys, values, jnp.broadcast_to(segment.positions.at(jnp.arange(keys.shape[2])), (B, keys.shape[2]))


jitted_read = jax.jit(read)


def numbered(first, count):
    """Taps of tokens `first[b], first[b] + 1, ..`: keys [i, 1], values [-i, 1]."""
    index = np.asarray(first)[:, None] + np.arange(count)
    k = np.stack([index, np.ones_like(index)], axis=-1)[:, :, None].astype(np.float32)
    return Taps(q=k, k=k, k_pre=k, v=k * np.array([-1, 1], np.float32), x=k)


def stored(segment, row, read=jitted_read):
    """Numbers of the tokens that a row of a segment holds, checked against their positions and values."""
    n = int(np.asarray(segment.length)[row])
    keys, values, positions = map(np.asarray, read(segment))
    keys, values, positions = keys[row, 0, :n], values[row, 0, :n], positions[row, :n]
    np.testing.assert_array_equal(keys[:, 0], positions)
    np.testing.assert_array_equal(values[:, 0], -positions)
    np.testing.assert_array_equal(keys[:, 1], 1)
    return positions.tolist()


class ListCache:
    """The storage policy of one row, in Python lists."""

    def __init__(self, tokens, sinks, recent, recent_of, decoded):
        held, middle = sinks + recent, max(tokens - sinks - recent, 0)
        numbers = list(range(tokens))
        self.exact = numbers[:sinks] + numbers[sinks + middle :]
        self.coded = numbers[sinks : sinks + middle]
        self.pinned = held if recent_of == "prompt" or decoded == "exact" else sinks
        self.keep = recent if recent_of == "ring" else 0
        self.flushes, self.length = decoded == "coded", tokens

    def append(self, count):
        self.exact += range(self.length, self.length + count)
        self.length += count

    def refresh(self):
        leaving = max(len(self.exact) - self.pinned - self.keep, 0) if self.flushes else 0
        self.coded += self.exact[self.pinned : self.pinned + leaving]
        del self.exact[self.pinned : self.pinned + leaving]


# prompt width, sinks, recent, block, recent_of, decoded
SHAPES = [
    (12, 2, 3, 4, "ring", "coded"),
    (12, 2, 3, 4, "prompt", "coded"),
    (12, 2, 3, 4, "ring", "exact"),
    (12, 0, 0, 4, "ring", "coded"),
    (12, 0, 0, 4, "prompt", "exact"),
    (6, 4, 4, 3, "ring", "coded"),
    (6, 4, 4, 3, "prompt", "coded"),
    (6, 4, 4, 3, "ring", "exact"),
    (1, 3, 0, 2, "ring", "coded"),
    (5, 0, 9, 1, "ring", "coded"),
    (9, 9, 0, 5, "prompt", "coded"),
    (8, 1, 2, 6, "ring", "coded"),
]
ragged = st.tuples(st.integers(0, 12), st.integers(0, 12))
script = st.lists(st.tuples(ragged, st.booleans()), min_size=1, max_size=12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_and_coded_parts_are_the_token_order(shape):
    width, sinks, recent, block, recent_of, decoded = shape
    method = REGISTRY["static-pca-h"](
        rank=1.0, sinks=sinks, recent=recent, recent_of=recent_of, decoded=decoded
    )
    room = 4 * block
    layout = Layout(SPEC, B, width, width + room, block, "float32")

    @settings(max_examples=15)
    @given(ragged, script)
    def check(lengths, steps):
        lengths = [1 + n % width for n in lengths]
        state = compress(method, layout, numbered([0] * B, width), np.array(lengths, np.int32))
        lists = [ListCache(n, sinks, recent, recent_of, decoded) for n in lengths]
        used = 0
        for wanted, wide in steps:
            tokens = block if wide else 1
            if used + tokens > block:
                state, used = refresh(method, layout, state), 0
                for row in lists:
                    row.refresh()
            counts = [
                min(c % (tokens + 1), n + room - row.length)
                for c, n, row in zip(wanted, lengths, lists, strict=True)
            ]
            taps = numbered([row.length for row in lists], tokens)
            state = append(method, layout, state, taps, np.array(counts, np.int32))
            used += tokens
            for b, row in enumerate(lists):
                row.append(counts[b])
                assert stored(state.ends[0], b) == row.exact
                assert stored(state.store.tokens, b) == row.coded
                assert sorted(row.exact + row.coded) == list(range(row.length))

    check()


@pytest.mark.parametrize("budget, prompt, block", [(7, 12, 4), (40, 12, 4), (3, 5, 1)])
def test_sinks_and_a_window_are_what_streaming_keeps(budget, prompt, block):
    sinks, capacity = 2, prompt + 4 * block
    method = REGISTRY["streamingllm"](budget=budget, keep=None, sinks=sinks)
    layout = Layout(SPEC, B, prompt, capacity, block, "float32")
    lengths = [prompt, 1]
    state = compress(method, layout, numbered([0] * B, prompt), np.array(lengths, np.int32))
    rows = [ListCache(n, sinks, budget - sinks, "ring", "coded") for n in lengths]
    for _ in range(4 * block):
        taps = numbered([row.length for row in rows], 1)
        state = refresh(method, layout, append(method, layout, state, taps, np.ones(B, np.int32)))
        for b, row in enumerate(rows):
            row.append(1)
            row.refresh()
            assert stored(state.ends[0], b) == row.exact


@functools.cache
def jitted_at():
    return jax.jit(lambda runs, slots: runs.at(slots))


gaps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=2, max_size=2)


@given(gaps, st.integers(0, 3), st.integers(0, 1), st.integers(0, 4))
def test_runs_are_slots_with_gaps(given_gaps, begin, which, more):
    start, jump = np.array(given_gaps, np.int32).T[:, None]
    runs, slots = Runs(jnp.asarray(start), jnp.asarray(jump)), np.arange(10, dtype=np.int32)

    def plain(gaps):
        return [i + sum(j for s, j in gaps if i >= s) for i in range(10)]

    assert jitted_at()(runs, slots)[0].tolist() == plain(given_gaps)
    assert int(runs.of_each(jnp.array([begin]))[0]) == plain(given_gaps)[begin]
    widened = [(s, j + more * (p == which)) for p, (s, j) in enumerate(given_gaps)]
    assert jitted_at()(runs.skip(which, jnp.array([more])), slots)[0].tolist() == plain(widened)
    assert jitted_at()(runs.from_slot(begin), slots)[0].tolist()[: 10 - begin] == plain(given_gaps)[begin:]


def test_a_slice_of_a_segment_keeps_its_positions():
    method = REGISTRY["static-pca-h"](rank=1.0, sinks=2, recent=3)
    layout = Layout(SPEC, B, 12, 20, 4, "float32")
    segment = compress(method, layout, numbered([0] * B, 12), np.array([12, 3], np.int32)).ends[0]
    assert [stored(segment, b) for b in range(B)] == [[0, 1, 9, 10, 11], [0, 1, 2]]
    for begin, end in [(0, 2), (2, 9), (1, 4), (4, 5)]:
        piece = exact_tokens.part(segment, begin, end)
        assert [stored(piece, b, read) for b in range(B)] == [stored(segment, b)[begin:end] for b in range(B)]


@pytest.mark.parametrize("kv_heads, group", [(8, 29), (1, 136), (130, 1)])
def test_every_query_head_reads_the_slots_of_its_kv_head(kv_heads, group):
    """More heads of either kind than eight bits tell."""
    owner = jnp.arange(kv_heads, dtype=owner_dtype(kv_heads))[None, None]
    seen = PerHead(jnp.zeros((1, 1, kv_heads), jnp.int32), owner, kv_heads).owned(jnp.arange(kv_heads), kv_heads * group)
    np.testing.assert_array_equal(seen[0, 0, 0], np.repeat(np.eye(kv_heads, dtype=bool), group, axis=0))
