"""What a decode step does with the buffers of a cache on a CPU: it writes tokens in place and reads blocks."""

import dataclasses
import functools
import math
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, exact_configuration, methods, model, prompts, run

from lowrank_kv_jax.generation.forward import decode_step, extend, layer_extend, prefill, refresh
from lowrank_kv_jax.generation.groups import refresh_group
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.method.cache import fork, insert_rows, take_rows
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache, load_cache, save_cache
from lowrank_kv_jax.storage.bits import Bits, bits_of
from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES, default_cache_dtype, narrow
from lowrank_kv_jax.storage.held import hold
from lowrank_kv_jax.storage.state import states, take_tokens, walk, write_tokens
from lowrank_kv_jax.storage.tokens_last import TokensLast

LONG = 32027  # capacity, a number that no other size equals
BLOCKS = 1 << 20  # bytes of the blocks that are widened at a time
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's backend alone has no bfloat16")
long_config = dataclasses.replace(PLAIN, context=LONG, num_layers=2, windows=(None, None))


@functools.cache
def step_of_a_layer(spec, dtype):
    """The compiled step of a layer of a long cache, and the cache's shapes."""
    method = parse_method(spec)
    layout = Layout(long_config.attention, 2, LONG - 503, LONG, 32, dtype)
    cache = abstract_cache(method, layout, bases_for(method, long_config))
    bases = bases_of_group(method, long_config.attention, bases_for(method, long_config))[0]
    x, positions, counts = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((2, 1, 32), jnp.float32), ((2, 1), jnp.int32), ((2,), jnp.int32))
    )
    layer = model(long_config).params["layers"][0]
    lowered = layer_extend.lower(
        long_config, method, layout, Place(0, None), layer, bases, cache.groups[0], x, positions, counts
    )
    return lowered.compile(), cache


def made_of_whole_buffers(text, cache, slots=None):
    """Operations with results of as many tokens and channels as a buffer of the cache, other than it itself.

    Args:
        slots: those of anything with so many tokens, too, be they of one channel.
    """
    leaves = [x for _, x, info in walk(cache) if info.axes[2:3] in (("tokens",), ("end_tokens",)) and len(x.shape) == 4]
    leaves = [x for x in leaves if x.shape[2] > 3000]  # blocks are of up to 2048
    stored = {(x.bits.dtype if isinstance(x, Bits) else x.dtype).name for x in leaves}
    sizes = {(x.shape[2], channels) for x in leaves for channels in (x.shape[3], cache.layout.spec.head_dim)}
    packed = {held.shape[2:] for _, held in states(cache) if hasattr(held, "runs")}  # components beside their bytes
    packed |= {x.shape[2:] for x in leaves if isinstance(x, TokensLast)}
    sizes |= packed | {(channels, tokens) for tokens, channels in packed}
    short = {"f32": "float32", "f16": "float16", "u16": "uint16", "bf16": "bfloat16", "s8": "int8", "u8": "uint8"}
    found, inner = [], False
    for line in text.splitlines():
        if opening := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            inner = "fused" in opening[1] or "wrapped" in opening[1]  # makes nothing: it is part of an operation
        made = re.match(r"\s+(?:ROOT )?%\S+ = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if inner or not made or made[3] in ("parameter", "get-tuple-element", "bitcast", "tuple"):
            continue
        shape = tuple(map(int, made[2].split(",")))
        writes = "dynamic-update-slice" in line or "scatter" in line
        of_one = slots in shape and made[1] == "s32"
        in_place = made[3] == "fusion" and (short.get(made[1]) in stored or of_one) and writes
        if (shape[-2:] in sizes or slots in shape) and not in_place:
            found.append(f"{made[3]} {made[1]}{list(shape)}")
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float16", "float32"))])
@pytest.mark.parametrize("spec", [
    *methods(), "ojakv:bits=2.5",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
        "static-pca:bits=2.5", "eigenattention:bits=2.5", "palu:bits=2.5", "streamingkv:bits=2.5", "single-svd:bits=2.5",
        "xkv:bits=2.5", "xkv:bits=2.5,recompress=8",
    )),
])
def test_a_step_neither_widens_nor_copies_a_whole_buffer(spec, dtype):
    compiled, cache = step_of_a_layer(spec, dtype)
    assert not made_of_whole_buffers(compiled.as_text(), cache)


def test_a_refresh_appends_codes_where_they_lie():
    """With `decoding=code`: nothing as long as the store but its own buffers, each written in place."""
    spec = "transform:bits=2+snapkv:keep=0.5,decoding=code"
    method, layout = parse_method(spec), Layout(long_config.attention, 2, 503, LONG, 32, "bfloat16")
    bases = bases_for(method, long_config)
    cache = abstract_cache(method, layout, bases)
    of_group = bases_of_group(method, long_config.attention, bases)[0]
    compiled = refresh_group.lower(method, layout, of_group, cache.groups[0]).compile()
    where = cache.groups[0].store.tokens.positions.position
    made = made_of_whole_buffers(compiled.as_text(), cache, where.shape[2])
    assert not made, made
    memory, held = compiled.memory_analysis(), sum(math.prod(x.shape) * x.dtype.itemsize for _, x, _ in walk(cache.groups[0]))
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < held / 20


def test_the_measure_sees_arrays_of_bfloat16_widened(monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.saving.saved_cache.hold", lambda tree, mesh: tree)
    compiled, cache = step_of_a_layer.__wrapped__("full", "bfloat16")
    assert f"f32[2, 4, {LONG}, 8]" in " ".join(made_of_whole_buffers(compiled.as_text(), cache))
    wide = step_of_a_layer("full", "float32")[0].memory_analysis().temp_size_in_bytes
    assert compiled.memory_analysis().temp_size_in_bytes > wide + 8 * BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(REGISTRY)]
)
def test_a_step_on_16_bits_needs_the_memory_of_one_on_float32_and_a_few_blocks(spec):
    wide, *narrower = (
        step_of_a_layer(spec, dtype)[0].memory_analysis().temp_size_in_bytes
        for dtype in ("float32", "bfloat16", "float16")
    )
    assert max(narrower) < wide + BLOCKS


@pytest.mark.parametrize("dtype", [
    pytest.param(dtype, marks=[pytest.mark.slow] if dtype == "float16" else []) for dtype in CACHE_DTYPES])
def test_memory_of_a_step_of_the_full_cache_does_not_grow_with_its_capacity(dtype):
    method, sizes = REGISTRY["full"](), []
    step = jax.jit(functools.partial(decode_step, method, long_config), donate_argnums=1)
    for capacity in (4001, 16007):
        cache = abstract_cache(method, Layout(long_config.attention, 2, 96, capacity, 32, dtype))
        compiled = step.lower(model(long_config).params, cache, jax.ShapeDtypeStruct((2,), jnp.int32)).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        held = sum(math.prod(x.shape) * x.dtype.itemsize for _, x, _ in walk(cache))
        assert compiled.memory_analysis().alias_size_in_bytes >= held  # every buffer is donated
    assert sizes[0] == sizes[1]


# ---- bits


def test_a_cpu_holds_the_bits_of_bfloat16_and_they_are_the_same_numbers():
    tokens = prompts(length=PROMPT)
    cache, _ = prefill(REGISTRY["full"](), PLAIN, model().params, tokens, capacity=CAPACITY, dtype="bfloat16")
    exact, _ = prefill(REGISTRY["full"](), PLAIN, model().params, tokens, capacity=CAPACITY, dtype="float32")
    held = cache.groups[0].ends[0].k
    assert isinstance(held, Bits) and held.bits.dtype == jnp.uint16 and held.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(held), np.asarray(exact.groups[0].ends[0].k.astype(jnp.bfloat16)))


some_methods = pytest.mark.parametrize("name", [
    name if name == "kivi" else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(REGISTRY)
])


@some_methods
def test_bits_and_arrays_of_bfloat16_decode_to_the_same_logits(name, monkeypatch):
    """Steps and refreshes, once on bits and once on the arrays that other platforms hold."""
    method, tokens = exact_configuration(REGISTRY[name]), prompts(length=PROMPT + 2 * BLOCK)
    tokens = tokens[:, : PROMPT + BLOCK + 3]
    cache, on_bits = run(method, PLAIN, tokens, PROMPT, width=8, dtype="bfloat16")
    assert any(isinstance(x, Bits) for _, x, _ in walk(cache))
    monkeypatch.setattr("lowrank_kv_jax.generation.groups.hold", lambda tree, mesh: tree)
    programs_of_their_own = dataclasses.replace(PLAIN, context=PLAIN.context + 1)
    cache, on_arrays = run(method, programs_of_their_own, tokens, PROMPT, width=8, dtype="bfloat16")
    assert not any(isinstance(x, Bits) for _, x, _ in walk(cache))
    # the two programs round products differently, which a cache of 8 binary digits makes visible
    np.testing.assert_allclose(on_bits, on_arrays, atol=0.03)


def test_a_saved_cache_holds_bfloat16_which_every_platform_loads(tmp_path, monkeypatch):
    method, saved = REGISTRY["full"](), types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
    cache, _ = prefill(method, PLAIN, model().params, prompts(length=PROMPT), capacity=CAPACITY, dtype="bfloat16")
    save_cache(tmp_path / "cache", cache, saved)
    here = load_cache(tmp_path / "cache", method, saved)
    chex.assert_trees_all_equal_structs(here, cache)
    chex.assert_trees_all_equal(here, cache)
    monkeypatch.setattr("lowrank_kv_jax.saving.saved_cache.hold", lambda tree, mesh: tree)  # as where bfloat16 is native
    there = load_cache(tmp_path / "cache", method, saved).groups[0].ends[0].k
    assert isinstance(there, jax.Array) and there.dtype == jnp.bfloat16
    np.testing.assert_array_equal(there, np.asarray(cache.groups[0].ends[0].k))


def test_rows_of_bits_are_forked_taken_and_inserted():
    tokens = prompts(length=PROMPT)
    cache, _ = prefill(REGISTRY["full"](), PLAIN, model().params, tokens, capacity=CAPACITY, dtype="bfloat16")
    both = insert_rows(take_rows(cache, [1]), take_rows(fork(cache, 2), [0]))
    assert isinstance(both.groups[0].ends[0].k, Bits)
    np.testing.assert_array_equal(np.asarray(both.groups[0].ends[0].k), np.asarray(cache.groups[0].ends[0].k)[::-1])


def test_kernels_get_arrays(monkeypatch):
    monkeypatch.setenv("LOWRANK_KV_BACKEND", "triton")
    cache = abstract_cache(REGISTRY["full"](), Layout(PLAIN.attention, 1, 8, 16, 4, "bfloat16"))
    assert not any(isinstance(x, Bits) for _, x, _ in walk(cache))
    assert hold(cache, None) is cache


def test_bits_are_written_and_moved_like_the_array():
    rng = np.random.default_rng(0)
    array = jnp.asarray(rng.normal(size=(2, 3, 9, 4)), jnp.bfloat16)
    new, start, counts = jnp.asarray(rng.normal(size=(2, 3, 2, 4)), jnp.float32), jnp.array([7, 8]), jnp.array([2, 1])
    np.testing.assert_array_equal(
        np.asarray(write_tokens(bits_of(array), new, start, counts)), write_tokens(array, new, start, counts)
    )
    np.testing.assert_array_equal(
        np.asarray(bits_of(array).moved(lambda x: take_tokens(x, start - 3, 3))), take_tokens(array, start - 3, 3)
    )
    np.testing.assert_array_equal(bits_of(array).read_block(3, 4), array[:, :, 3:7])
    np.testing.assert_array_equal(jnp.sum(bits_of(array), axis=-1), jnp.sum(array, axis=-1))


# ---- the dtypes


def test_bfloat16_is_the_default():
    assert default_cache_dtype() == "bfloat16"


def test_what_float16_cannot_hold_is_clipped_and_what_is_no_number_stays():
    x = jnp.array([1e6, -1e6, 65504.0, 1.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(
        np.asarray(narrow(x, "float16"), np.float32), [65504, -65504, 65504, 1, np.inf, -np.inf, np.nan]
    )
    np.testing.assert_array_equal(narrow(x[:-1], "bfloat16"), x[:-1].astype(jnp.bfloat16))
    buffer, one = jnp.zeros((1, 1, 2, 1), jnp.float16), jnp.ones((1,), jnp.int32)
    assert write_tokens(buffer, jnp.full((1, 1, 1, 1), 1e6), one, one)[0, 0, 1, 0] == 65504


def beyond_float16(method, chunk=None):
    """Logits of two blocks that were appended and coded behind a prompt, keys and values far beyond the range of their
    float16 cache; and that cache."""
    params = jax.tree.map(lambda x: x, model().params)
    for layer in params["layers"]:
        for name in ("k_proj", "v_proj"):
            layer["attention"][name]["kernel"] = layer["attention"][name]["kernel"] * 1e6
    tokens, bases, found = prompts(length=PROMPT + 8), bases_for(method), []
    cache, _ = prefill(method, PLAIN, params, tokens[:, :PROMPT], bases=bases, capacity=CAPACITY, block=4, dtype="float16",
                       chunk=chunk)
    for begin in (PROMPT, PROMPT + 4):
        cache, logits = extend(method, PLAIN, params, cache, tokens[:, begin : begin + 4], bases=bases, all_logits=True)
        cache = refresh(method, cache, bases=bases)
        found.append(logits)
    return jnp.stack(found), cache


@some_methods
def test_keys_beyond_the_range_of_float16_leave_logits_finite(name):
    """What a float16 cache has to clip, it clips: prefilled, appended and coded, means of pages and prompts, too."""
    logits, cache = beyond_float16(exact_configuration(REGISTRY[name]))
    assert np.isfinite(logits).all()
    chex.assert_tree_all_finite(cache)


@pytest.mark.parametrize("chunk", [None, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", [
    "palu:sinks=2,recent=4", "single-svd:centred=true,sinks=2,recent=4",
    "shadowkv:budget=16,keep=none,sinks=2,recent=4,outliers=2",
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in
      ("quest:budget=16,keep=none,sinks=2,recent=4,page=4,dense_layers=0", "streamingkv:bits=2.5,sinks=2,recent=4", "ojakv:bits=2.5,sinks=2,recent=4", "xkv:centred=true,sinks=2,recent=4",
       "eigenattention:rope=post,sinks=2,recent=4")),
])
def test_sums_of_what_float16_holds_stay_within_it(spec, chunk):
    """Coefficients, differences to means, and means of pages go beyond the largest of what they are made of."""
    logits, cache = beyond_float16(parse_method(spec), chunk)
    assert np.isfinite(logits).all()
    chex.assert_tree_all_finite(cache)
