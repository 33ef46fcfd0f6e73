"""What every registered method promises of whole models: of a few by default, of all under `-m slow`.

Each promise is tested in a configuration that the method declares: where it is exact (`Part.exact_at`: full rank, full
budget), or its default compression of short prompts (`Part.small`). What a method of one's own is asked too is
`lowrank_kv_jax.testing`; here is what needs other models, or measures programs.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    BLOCK,
    CAPACITY,
    PLAIN,
    PROMPT,
    QWEN,
    WINDOWED,
    bases_for,
    exact_configuration,
    methods,
    model,
    prompts,
    run,
    small_configuration,
)

from lowrank_kv_jax.generation.forward import (
    compress_group,
    embed_tokens,
    extend,
    layer_prefill,
    make_layout,
    prefill,
    refresh,
)
from lowrank_kv_jax.generation.generate import Progress, decode_block
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import cache_bytes, full_cache_bytes
from lowrank_kv_jax.methods import REGISTRY, machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.held import hold
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.testing.promises import (
    PROMISES,
    TOLERANCE,
    assert_exact,
    equals_full_attention,
    full_logits,
    text,
)

SMALL = dataclasses.replace(PLAIN, num_layers=2, windows=(None, None), context=1 << 14)  # one layer's programs serve both
every_method = pytest.mark.parametrize("name", list(methods(slow=False)))
on_a_model = pytest.mark.parametrize("name", list(methods()))
BY_ARRAYS = {"kivi", "momentkv"}  # representatives of which `test_array_contract` asks the same, with no model around them
on_few_models = pytest.mark.parametrize("name", list(methods(BY_ARRAYS)))

# the fields that low-rank methods share, in the combinations that the defaults leave out
VARIANTS = [
    pytest.param("ojakv:rank=1.0,normalize=token,recent_of=prompt,sinks=3", marks=pytest.mark.slow),
    "ojakv:rank=1.0,estimator=frequent_directions,sinks=3",
    "static-pca-h:rank=1.0,rope=pre,order=reconstruct,recent_of=prompt,sinks=0,recent=9",
    "static-pca-h:rank=1.0,heads=joint,decoded=exact,sinks=2,recent=0",
    pytest.param("static-pca:energy=1.0,heads=joint", marks=pytest.mark.slow),
    "single-svd:rank=1.0,rope=post,heads=per_head,decoded=coded,sinks=1,recent=2,centred=true",
    pytest.param("single-svd:rank=1.0,decoded=coded,recent_of=prompt,order=reconstruct", marks=pytest.mark.slow),
    pytest.param("streamingllm:keep=none,budget=160,positions=original", marks=pytest.mark.slow),
    "transform:bits=none,recent_bits=none,group=2,heads=per_head,rope=post,metric=plain,sinks=1,recent=2",
    pytest.param("transform:bits=none,recent_bits=none,group=2,kv=joint,sinks=1,recent=2", marks=pytest.mark.slow),
    "transform:bits=none,recent_bits=none,kv=joint,rope=tile,metric=plain,sinks=1,recent=2",
    pytest.param("transform:bits=none,recent_bits=none,kv=joint,heads=per_head,rope=post,metric=plain,sinks=1,recent=2", marks=pytest.mark.slow),
]


def shallow(name):
    """For programs of all layers one after the other: a single layer, where the method does not store two together."""
    return SMALL if name == "xkv" else dataclasses.replace(SMALL, num_layers=1, windows=(None,))


@functools.cache
def small_run(name, seed=0):
    return run(small_configuration(REGISTRY[name]), SMALL, text(SMALL, seed), PROMPT)


# ---- the promises of `lowrank_kv_jax.testing` -------------------------------------------------------


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@on_a_model
def test_the_contract(promise, name):
    promise(small_configuration(REGISTRY[name]), shallow(name))


# ---- exactness -------------------------------------------------------------------------------------


def test_the_uncompressed_cache_equals_prefill_of_everything():
    tokens, exact = text(WINDOWED), full_logits(WINDOWED)
    for n in (0, 1, 15, 16, 17, 40):
        lengths = jnp.full((2,), PROMPT + n, jnp.int32)
        _, logits = prefill(
            REGISTRY["full"](), WINDOWED, model(WINDOWED).params, tokens, lengths, dtype=jnp.float32
        )
        assert_exact(exact[:, n], logits)


@pytest.mark.parametrize("name", list(methods(BY_ARRAYS | {"ojakv"})))
@pytest.mark.parametrize(
    "config, width",
    [pytest.param(SMALL, 1, marks=pytest.mark.slow), pytest.param(QWEN, 4, marks=pytest.mark.slow), (WINDOWED, 8)],
    ids=["llama", "qwen3", "windowed"],
)
def test_full_rank_and_budget_reproduce_exact_attention(name, config, width):
    """Prefill, then 40 tokens one by one or several at once, with refreshes between them."""
    equals_full_attention(exact_configuration(REGISTRY[name]), config, width)


@pytest.mark.parametrize("spec", VARIANTS)
def test_full_rank_is_exact_in_every_variant(spec):
    equals_full_attention(parse_method(spec), WINDOWED)


def short_logits(method, config, width, prompt=PROMPT, capacity=CAPACITY):
    """Of prompts of one token, and of fewer than sinks and recent tokens together."""
    tokens, lengths = text(config)[:, : prompt + 32], jnp.array([1, 6], jnp.int32)
    return run(method, config, tokens, prompt, lengths=lengths, capacity=capacity, width=width)[1]


exact_short_logits = functools.cache(functools.partial(short_logits, REGISTRY["full"]()))


@pytest.mark.slow
@on_a_model
def test_prompts_shorter_than_the_exact_tokens(name):
    """Parts stay empty for a while: no NaN, and still exact at full rank."""
    logits = short_logits(exact_configuration(REGISTRY[name]), WINDOWED, 8)
    assert_exact(logits, exact_short_logits(WINDOWED, 8))
    assert np.isfinite(short_logits(small_configuration(REGISTRY[name]), SMALL, 1)).all()


@pytest.mark.slow
@on_a_model
def test_no_room_for_tokens_between_the_exact_ends(name):
    """A cache made for prompts that sinks and recent tokens fill."""
    logits = short_logits(exact_configuration(REGISTRY[name]), SMALL, 4, 10, 64)
    assert_exact(logits, exact_short_logits(SMALL, 4, 10, 64))


# ---- compression -----------------------------------------------------------------------------------


@on_a_model
def test_compression_is_finite_smaller_and_shows(name):
    cache, logits = small_run(name)
    assert np.isfinite(logits).all()
    method = cache.method
    if method == exact_configuration(REGISTRY[name]):
        return  # nothing to configure: it does not compress
    exact = full_logits(SMALL)
    np.testing.assert_allclose(logits[:, 0], exact[:, 0], atol=TOLERANCE)  # prefill attends exactly
    assert np.abs(logits[:, 1:] - exact[:, 1:]).max() > 100 * TOLERANCE  # so that the tests above can fail
    if machine_of(method).standing_reading is not None:
        return  # it reads less of what it keeps
    spent = cache_bytes(cache, bases_for(method, SMALL))
    assert spent.total < 2 * full_cache_bytes(SMALL.attention, 2 * CAPACITY)  # float32: twice 16 bit


@on_a_model
def test_init_has_the_shapes_of_every_later_state(name):
    cache, _ = small_run(name)
    method, layout = cache.method, cache.layout
    machine = machine_of(method)
    for group, bases in zip(cache.groups, machine.group_bases(SMALL.attention, bases_for(method, SMALL)), strict=True):
        abstract = jax.eval_shape(lambda own: hold(machine.init(layout, own), None), bases)
        chex.assert_trees_all_equal_structs(abstract, group)
        for x, y in zip(jax.tree.leaves(abstract), jax.tree.leaves(group), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.slow
@on_a_model
def test_a_method_carries_nothing_from_one_prompt_to_the_next(name):
    _, first = small_run(name)
    _, other = small_run(name, seed=1)
    _, again = run(small_configuration(REGISTRY[name]), SMALL, text(SMALL), PROMPT)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


@pytest.mark.slow
@on_a_model
def test_a_row_of_a_ragged_batch_is_the_row_alone(name):
    method, tokens, length = small_configuration(REGISTRY[name]), text(SMALL), 61
    _, together = run(method, SMALL, tokens, PROMPT, lengths=jnp.array([PROMPT, length], jnp.int32))
    np.testing.assert_allclose(together[0], small_run(name)[1][0], atol=2e-4)
    alone = jnp.concatenate([tokens[1:, :length], tokens[1:, PROMPT:]], axis=1)
    _, alone = run(method, SMALL, alone, length, capacity=length + CAPACITY - PROMPT)
    np.testing.assert_allclose(together[1], alone[0], atol=2e-4)


@on_few_models
def test_bfloat16_is_the_default_and_stays_close(name):
    method, tokens = exact_configuration(REGISTRY[name]), text(SMALL)[:, : PROMPT + 1]
    cache, logits = run(method, SMALL, tokens, PROMPT, dtype=None)
    assert cache.layout.dtype == "bfloat16"
    wide = [
        path
        for path, x, info in walk(cache)
        if info.kind in ("exact", "coefficients") and x.dtype != jnp.bfloat16
    ]
    assert not wide
    np.testing.assert_allclose(logits, full_logits(SMALL)[:, :2], atol=0.2)


# ---- limits ----------------------------------------------------------------------------------------


@on_a_model
def test_going_beyond_the_block_or_the_capacity_is_loud(name):
    """Inside of jit nothing can be raised: logits turn NaN and stay so."""
    method, tokens = small_configuration(REGISTRY[name]), text(SMALL)
    params, bases = model(SMALL).params, bases_for(method, SMALL)
    step = functools.partial(extend, method, SMALL, params, tokens=tokens[:, :1], bases=bases)
    cache, _ = prefill(
        method,
        SMALL,
        params,
        tokens[:, :PROMPT],
        bases=bases,
        capacity=CAPACITY,
        block=BLOCK,
        dtype=jnp.float32,
    )
    for _ in range(BLOCK):
        cache, logits = step(cache)
    assert np.isfinite(logits).all()
    cache, logits = step(cache)
    assert np.isnan(logits).all()
    cache, logits = step(refresh(method, cache, bases=bases))
    assert np.isnan(logits).all()

    cache, logits = run(method, SMALL, prompts(length=CAPACITY), PROMPT)
    assert np.isfinite(logits).all()
    _, logits = step(refresh(method, cache, bases=bases))
    assert np.isnan(logits).all()


def short_row_to_its_limit(method, config, prompt):
    """Logits `[T, V]` of 3 tokens of a prompt that is padded to `prompt`, and of all that the cache has room for; those behind.

    Two equal rows and 8 tokens at once: the programs are those of the tests at full rank.
    """
    params, bases = model(config).params, bases_for(method, config)
    tokens = jnp.repeat(prompts(rows=1, length=CAPACITY + BLOCK, seed=3), 2, axis=0)
    step = functools.partial(extend, method, config, params, bases=bases)
    cache, logits = prefill(
        method, config, params, tokens[:, :prompt], np.array([3, 3]), bases=bases, capacity=CAPACITY, block=BLOCK,
        dtype=jnp.float32,
    )
    limit, out = int(cache.limit[0]), [np.asarray(logits)[:1]]
    for i, begin in enumerate(range(3, limit, 8)):
        if i and i % (BLOCK // 8) == 0:
            cache = refresh(method, cache, bases=bases)
        count = min(8, limit - begin)
        cache, logits = step(cache, tokens[:, begin : begin + 8], np.array([count, count]), all_logits=True)
        out.append(np.asarray(logits)[0, :count])
    _, behind = step(refresh(method, cache, bases=bases), tokens[:, :8], np.array([1, 1]), all_logits=True)
    return np.concatenate(out), np.asarray(behind)[:, :1]


exact_short_row = functools.cache(functools.partial(short_row_to_its_limit, REGISTRY["full"](), WINDOWED, 3))


@on_few_models
def test_a_short_row_has_the_room_that_its_padding_left(name):
    """Up to `limit`, which is the capacity unless only tokens of a prompt can take some of the slots."""
    method = exact_configuration(REGISTRY[name])
    logits, behind = short_row_to_its_limit(method, WINDOWED, PROMPT)
    room, machine, bases = len(logits) + 2, machine_of(method), bases_for(method, WINDOWED)
    layout = make_layout(WINDOWED, 2, PROMPT, CAPACITY, BLOCK)
    ends = [machine.ends_of(layout, group) for group in machine.group_bases(WINDOWED.attention, bases)]
    assert room == CAPACITY if all(one.flushes or one.everything(layout) for one in ends) else CAPACITY - PROMPT + 3 <= room < CAPACITY
    assert_exact(logits, exact_short_row()[0][: len(logits)])
    assert np.isnan(behind).all()


@pytest.mark.slow
@on_a_model
def test_compression_of_a_short_row_does_not_see_its_padding(name):
    method = small_configuration(REGISTRY[name])
    wide, narrow = (short_row_to_its_limit(method, SMALL, prompt)[0] for prompt in (64, 40))
    assert np.isfinite(wide).all() and np.isfinite(narrow).all()
    np.testing.assert_allclose(wide, narrow[: len(wide)], atol=2e-4)


@on_a_model
def test_a_cache_of_another_method_is_refused(name):
    cache, _ = small_run(name)
    others = [small_configuration(cls) for other, cls in REGISTRY.items() if other != name]
    for other in [*others, exact_configuration(REGISTRY[name])]:
        if other == cache.method:
            continue
        for call in (
            lambda m: extend(m, SMALL, model(SMALL).params, cache, jnp.zeros((2, 1), jnp.int32)),
            lambda m: refresh(m, cache),
        ):
            with pytest.raises(ValueError, match="this cache was made by"):
                call(other)


@every_method
def test_missing_bases_are_asked_for(name):
    method = small_configuration(REGISTRY[name])
    if not method.calibrated:
        return
    with pytest.raises(ValueError, match="needs calibrated bases"):
        prefill(method, SMALL, model(SMALL).params, text(SMALL)[:, :PROMPT])
    with pytest.raises(ValueError, match="bases hold 1 groups"):
        prefill(method, SMALL, model(SMALL).params, text(SMALL)[:, :PROMPT], bases=bases_for(method, SMALL)[:1])


@every_method
def test_fields_stand_in_a_frozen_dataclass(name):
    cls = REGISTRY[name]
    assert issubclass(cls, Part) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert cls.name == name and cls.__doc__
    assert not getattr(cls, "__abstractmethods__", None)


# ---- compiled --------------------------------------------------------------------------------------


def start_of_decode(method, capacity):
    """What a cache for `capacity` tokens decodes from: parameters, cache, progress and keys."""
    params, bases, tokens = model(SMALL).params, bases_for(method, SMALL), text(SMALL)[:, :PROMPT]
    cache, logits = prefill(
        method, SMALL, params, tokens, bases=bases, capacity=capacity, block=BLOCK, dtype=jnp.float32
    )
    progress = Progress(logits.argmax(-1).astype(jnp.int32), jnp.zeros((2,), bool), jnp.zeros((2,), bool))
    return params, cache, progress, jax.vmap(jax.random.key)(jnp.arange(2))


@pytest.mark.parametrize("name", list(methods(BY_ARRAYS | {"ojakv"})))
def test_one_program_decodes_in_place(name):
    """One executable for 64 tokens and their refreshes; the cache is donated, nothing grows with it."""
    method = small_configuration(REGISTRY[name])
    bases, steps = bases_for(method, SMALL), jnp.int32(BLOCK)
    few = 1536  # slots that a CPU might read as one block, and rebuild before the loop over the tokens
    params, cache, progress, keys = start_of_decode(method, few)
    held, temporary, programs = [], [], []
    for capacity in (SMALL.context, few):
        example = jax.eval_shape(functools.partial(start_of_decode, method, capacity))
        program = decode_block.lower(method, SMALL, *example, steps, bases=bases).compile()
        memory = program.memory_analysis()
        held.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(example[1])))
        assert memory.alias_size_in_bytes >= held[-1]
        temporary.append(memory.temp_size_in_bytes)
        programs.append(program)
    # attention reads, and rebuilds, blocks of up to 2048 of the 16384 tokens; a copied leaf would be a quarter, or, where
    # tokens take a bit or two, three blocks of floats are the most
    more, block = temporary[0] - temporary[1], 4 * 2 * 2048 * SMALL.kv_heads * SMALL.head_dim
    assert more <= max(0.17 * (held[0] - held[1]), 3 * block), f"{more} bytes of {held[0] - held[1]}"
    keys_in_floats = 4 * SMALL.num_layers * 2 * few * SMALL.kv_heads * SMALL.head_dim
    assert temporary[1] < keys_in_floats, f"{temporary[1]} bytes of temporaries, {keys_in_floats} of all keys"

    start, shapes = cache, jax.eval_shape(lambda x: x, cache)
    for _ in range(4):
        cache, progress, _ = programs[-1](params, cache, progress, keys, steps, bases=bases)
    chex.assert_trees_all_equal_shapes_and_dtypes(cache, shapes)
    assert all(x.is_deleted() for x in jax.tree.leaves(start))


@on_few_models
def test_jitted_prefill_equals_layer_by_layer(name):
    method = small_configuration(REGISTRY[name])
    bases, tokens, lengths = bases_for(method, SMALL), prompts(), jnp.array([PROMPT, 20], jnp.int32)

    def whole(params, bases, tokens, lengths):
        return prefill(
            method, SMALL, params, tokens, lengths, bases=bases, capacity=CAPACITY, block=BLOCK, dtype=jnp.float32
        )

    inputs = model(SMALL).params, bases, tokens, lengths
    cache, logits = jax.jit(whole)(*inputs)
    eager_cache, eager_logits = whole(*inputs)
    np.testing.assert_allclose(logits, eager_logits, atol=1e-5)
    chex.assert_trees_all_equal_structs(cache, eager_cache)
    step = functools.partial(extend, method, SMALL, model(SMALL).params, tokens=tokens[:, :1], bases=bases)
    np.testing.assert_allclose(step(cache)[1], step(eager_cache)[1], atol=1e-4)


def temporary_bytes(layers, compute):
    """Temporary memory of `compute(config, params, tokens)`, compiled for four prompts of 256 tokens."""
    config = dataclasses.replace(SMALL, num_layers=layers, windows=(None,) * layers)
    params = jax.eval_shape(lambda: model(config).params)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    compiled = jax.jit(functools.partial(compute, config)).lower(params, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


LAYER = 4 * 256 * 2 * SMALL.kv_heads * SMALL.head_dim * 4  # bytes of one layer's exact keys and values


@pytest.mark.parametrize("spec", [
    pytest.param("streamingllm:budget=16,keep=none", marks=pytest.mark.slow), "static-pca-h:rank=0.25,sinks=4,recent=4"])
def test_prefill_holds_the_exact_keys_and_values_of_one_group(spec):
    """Temporary memory of a jitted prefill does not grow with the number of layers."""
    method = parse_method(spec)

    def compute(config, params, tokens):
        with jax.ensure_compile_time_eval():
            bases = bases_for(method, config)
        return prefill(method, config, params, tokens, bases=bases, dtype=jnp.float32)

    assert temporary_bytes(9, compute) - temporary_bytes(3, compute) < 0.5 * LAYER


def test_compressing_at_the_end_would_hold_all_of_them():
    """The measure that the test above relies on sees keys and values that wait for the last layer."""
    method = small_configuration(REGISTRY["sliding-window"])

    def compute(config, params, tokens):
        layout = make_layout(config, *tokens.shape, None, dtype=jnp.float32)
        x, positions, taps = embed_tokens(config, params, tokens), jnp.arange(256)[None] + 0 * tokens, []
        for layer in params["layers"]:
            x, tap = layer_prefill(config, None, layer, x, positions)
            taps.append(tap)
        lengths = jnp.full((4,), 256, jnp.int32) + jnp.isnan(x.sum())
        return x, [compress_group(method, layout, None, (tap,), lengths) for tap in taps]

    assert temporary_bytes(9, compute) - temporary_bytes(3, compute) > 5 * LAYER
