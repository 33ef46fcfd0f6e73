"""Coefficients on the lanes of a TPU: the same cache, transposed; and kernels under the whole core."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, bases_for, model, prompts

from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork, with_token_layout
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.block_reads import slice_block
from lowrank_kv_jax.storage.lanes import LANES, EndsOnLanes, QuantisedOnLanes, TokensOnLanes, WaterFilledOnLanes
from lowrank_kv_jax.storage.pages_in_rows import ExactPages, FlatPages
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.storage.tiles_on_lanes import PackedOnLanes, TiledOnLanes

METHOD = parse_method("ojakv:rank=0.5,sinks=4,recent=8")
SHORT = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))


def prefilled(config=SHORT, method=METHOD, params=None):
    params = model(config).params if params is None else params
    bases = bases_for(method, config)
    tokens = prompts(rows=2, length=48, vocab=config.vocab_size)
    lengths = np.array([48, 31], np.int32)
    cache, _ = prefill(
        method, config, params, tokens, lengths, bases=bases, capacity=CAPACITY, block=BLOCK, dtype="float32"
    )
    return cache, bases, params


def decode(cache, bases, params, config, method, steps):
    out = []
    for i in range(steps):
        token = np.array([[i + 1], [2 * i]], np.int32)
        cache, logits = extend(method, config, params, cache, token, bases=bases)
        out.append(np.asarray(logits))
        if i % BLOCK == BLOCK - 1:
            cache = refresh(method, cache, bases=bases)
    return cache, np.stack(out)


def leaves(cache):
    return {name: np.asarray(array) for name, array, _ in walk(cache)}


def test_there_and_back_is_the_same_cache_and_lanes_are_what_they_say():
    cache, bases, _ = prefilled()
    lanes = with_token_layout(cache, "lanes")
    assert lanes.layout.tokens == "lanes" and isinstance(lanes.groups[0].store.tokens.k, TokensOnLanes)
    rows, held = cache.groups[0].store.tokens.k, lanes.groups[0].store.tokens.k
    np.testing.assert_array_equal(held.on_lanes[..., : rows.shape[2]], np.swapaxes(rows, 2, 3))
    assert held.shape == rows.shape and held.on_lanes.shape[3] % LANES == 0 and isinstance(lanes.groups[0].ends[0].k, EndsOnLanes)
    back = with_token_layout(lanes, "rows")
    chex.assert_trees_all_equal_structs(back, cache)
    for name, value in leaves(cache).items():
        np.testing.assert_array_equal(leaves(back)[name], value)
    assert more_bytes(lanes, cache) == {"exact", "coefficients"}
    expected = abstract_cache(METHOD, lanes.layout, bases)
    chex.assert_trees_all_equal_shapes_and_dtypes(lanes, expected)


def more_bytes(lanes, rows):
    """Kinds of bytes of which there are more on lanes: tokens are rounded up to whole registers."""
    kinds = {name: (a, rows_bytes) for (name, a), rows_bytes in zip(
        cache_bytes(lanes).by_kind.items(), cache_bytes(rows).by_kind.values(), strict=True)}
    assert all(a >= b for a, b in kinds.values())
    return {name for name, (a, b) in kinds.items() if a > b}


def decoded_on_both(spec, config=SHORT):
    """The caches in rows and on lanes after the same steps, whose logits were equal; and their bases."""
    method, params = parse_method(spec), None if config is SHORT else init_params(config, jax.random.key(0))
    cache, bases, params = prefilled(config, method, params)
    lanes = with_token_layout(fork(cache), "lanes")
    rows, expected = decode(cache, bases, params, config, method, BLOCK + 2)
    lanes, found = decode(lanes, bases, params, config, method, BLOCK + 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    return rows, lanes, bases


@pytest.mark.parametrize(
    "spec, stored, more",
    [
        pytest.param("ojakv:rank=0.5,sinks=4,recent=8", TokensOnLanes, {"coefficients"}, marks=pytest.mark.slow),
        ("ojakv:rank=0.5,sinks=4,recent=8,bits=8", QuantisedOnLanes, set()),
        pytest.param("osp:rank=0.5,bits=8,chunks=1", QuantisedOnLanes, set(), marks=pytest.mark.slow),
        pytest.param("ojakv:rank=0.5,sinks=4,recent=8,bits=4", TiledOnLanes, set(), marks=pytest.mark.slow),
        pytest.param("kivi:group=8,recent=8", TiledOnLanes, {"coefficients", "scales"}, marks=pytest.mark.slow),
        pytest.param(
            "kivi:bits=4,group=8,recent=8+kvzip:keep=0.5", PackedOnLanes, {"coefficients", "scales"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_cache_on_lanes_decodes_and_refreshes_as_one_in_rows(spec, stored, more):
    """Bytes are more where tokens are rounded up to whole registers, or what a token has is."""
    rows, lanes, bases = decoded_on_both(spec)
    assert isinstance(lanes.groups[0].store.tokens.k, stored)
    chex.assert_trees_all_equal_shapes_and_dtypes(lanes, abstract_cache(parse_method(spec), lanes.layout, bases))
    assert more_bytes(lanes, rows) == more | {"exact"}
    np.testing.assert_allclose(
        slice_block(lanes.groups[0].store.tokens.k, 0, 32), slice_block(rows.groups[0].store.tokens.k, 0, 32), atol=1e-5
    )
    back = with_token_layout(lanes, "rows")
    chex.assert_trees_all_equal_structs(back, rows)


@pytest.mark.parametrize("spec", [
    "transform:bits=3,sinks=4,recent=8", pytest.param("transform:bits=3,kv=joint,sinks=4,recent=8", marks=pytest.mark.slow)])
def test_packed_components_lie_on_lanes_too(spec):
    """Their bytes are rounded up to whole registers."""
    rows, lanes, _ = decoded_on_both(spec)
    held, stored = (x.groups[0].store.tokens.k for x in (rows, lanes))
    assert isinstance(stored, WaterFilledOnLanes) and (rows.groups[0].store.tokens.v.shape[-1] == 0) == ("kv=joint" in spec)
    size = held.codes.shape[-1]
    tokens = held.codes.shape[2]
    np.testing.assert_array_equal(np.swapaxes(stored.on_lanes, 2, 3)[:, :, :tokens, :size], held.codes)
    assert stored.on_lanes.shape[2] == -(-size // 8) * 8 and stored.on_lanes.shape[3] == -(-tokens // LANES) * LANES
    chex.assert_trees_all_equal_structs(with_token_layout(lanes, "rows"), rows)


@pytest.mark.parametrize("spec, keys, values", [
    ("quest:budget=16,keep=none,page=8,sinks=4,recent=8,dense_layers=0", ExactPages, ExactPages),
    pytest.param(
        "shadowkv:budget=16,keep=none,sinks=4,recent=8,outliers=1,rank=32", FlatPages, ExactPages, marks=pytest.mark.slow
    ),
])
def test_what_is_read_in_pages_stays_in_rows(spec, keys, values):
    config = dataclasses.replace(SHORT, head_dim=128, q_heads=2, kv_heads=1)
    rows, lanes, bases = decoded_on_both(spec, config)
    held, stored = (x.groups[0].store.tokens for x in (rows, lanes))
    assert type(stored.k) is keys and type(stored.v) is values and isinstance(lanes.groups[0].ends[0].k, EndsOnLanes)
    np.testing.assert_array_equal(stored.v.rows, held.v)
    chex.assert_trees_all_equal_shapes_and_dtypes(lanes, abstract_cache(parse_method(spec), lanes.layout, bases))
    back = with_token_layout(lanes, "rows")
    chex.assert_trees_all_equal_structs(back, rows)
    for name, value in leaves(back).items():
        np.testing.assert_allclose(value, leaves(rows)[name], atol=1e-5)


@pytest.mark.parametrize("spec", [
    "ojakv:rank=0.5,sinks=4,recent=8+snapkv:budget=30,recent=8",
    pytest.param("ojakv:rank=0.5,sinks=4,recent=8,rope=pre+h2o:budget=30,recent=8", marks=pytest.mark.slow),
])
def test_selected_tokens_on_lanes_vote_as_in_rows(spec):
    decoded_on_both(spec)


def test_an_unknown_layout_is_refused():
    cache, _, _ = prefilled()
    with pytest.raises(ValueError, match="columns.*rows, lanes"):
        with_token_layout(cache, "columns")


POST = "ojakv:rank=0.5,sinks=4,recent=8"
PRE = "ojakv:rank=0.5,sinks=4,recent=8,rope=pre"
SELECTED = "ojakv:rank=0.5,sinks=4,recent=8,rope=pre+snapkv:keep=0.5"
MIXED = "transform:bits=3,sinks=4,recent=8+snapkv:keep=0.5"
JOINT = "transform:bits=3,kv=joint,sinks=4,recent=8"
PAGES = "shadowkv:budget=16,keep=none,sinks=4,recent=8,outliers=1,rank=8"


@pytest.mark.parametrize(
    "backend, layout, spec",
    [
        *(pytest.param("triton", "rows", spec, marks=pytest.mark.slow) for spec in (POST, PRE, SELECTED, PAGES)),
        *(pytest.param("tpu", "lanes", spec, marks=pytest.mark.slow) for spec in (POST, PRE, SELECTED, MIXED, JOINT)),
    ],
)
def test_the_core_decodes_through_kernels_as_through_xla(monkeypatch, backend, layout, spec):
    """Each of them: that one gives way to XLA would be a warning."""
    config, method = dataclasses.replace(SHORT, q_heads=2, kv_heads=1), parse_method(spec)
    cache, bases, params = prefilled(config, method, init_params(config, jax.random.key(0)))
    cache = with_token_layout(cache, layout)
    token = np.array([[5], [6]], np.int32)
    _, expected = extend(method, config, params, fork(cache), token, bases=bases)
    jax.clear_caches()  # the backend is chosen while tracing
    monkeypatch.setenv("LOWRANK_KV_BACKEND", backend)
    _, found = extend(method, config, params, cache, token, bases=bases)
    monkeypatch.undo()
    jax.clear_caches()
    np.testing.assert_allclose(found, expected, atol=2e-4)
