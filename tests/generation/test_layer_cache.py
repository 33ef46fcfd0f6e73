"""Layer by layer, a cache is what the whole model's is; and what it is fed wrongly, it says."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, exact_configuration, softmax_attention

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import half_split_channels
from lowrank_kv_jax.methods import REGISTRY

SPEC = dataclasses.replace(PLAIN.attention, windows=(None, 24, None))
PROMPT, TOTAL, BLOCK, LENGTHS = 40, 64, 8, (40, 29)
SIZES = {"prompt": PROMPT, "capacity": TOTAL, "block": BLOCK, "dtype": "float32"}
SINKS = np.linspace(-1.0, 5.0, SPEC.q_heads, dtype=np.float32)
rotary_taps = jax.jit(lkv.rotary_taps, static_argnums=0)
append = jax.jit(lkv.append_and_attend, donate_argnums=1)
refresh = jax.jit(lkv.refresh_layer, donate_argnums=1)


@functools.cache
def heads(seed=0):
    """q, k before RoPE, v of `TOTAL` tokens, NumPy's: a slice of them is no program."""
    rng = np.random.default_rng(seed)
    shapes = (2, TOTAL, SPEC.q_heads, SPEC.head_dim), (2, TOTAL, SPEC.kv_heads, SPEC.head_dim)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in (shapes[0], shapes[1], shapes[1]))


def taps_at(positions, begin, end, spec=SPEC, seed=0):
    q, k, v = (x[:, begin:end] for x in heads(seed))
    return rotary_taps(spec, q, k, v, positions, jnp.asarray(SINKS) if spec.sink_logits else None)


def prompt_taps(spec=SPEC, seed=0):
    return taps_at(jnp.broadcast_to(jnp.arange(PROMPT), (2, PROMPT)), 0, PROMPT, spec, seed)


def decoded(plan, spec=SPEC, lengths=LENGTHS, steps=16, forget=False):
    """Prompts of different lengths, then a token at a time: what each attends to, `[B, steps, N, D]`."""
    cache = lkv.prefill_layer(plan, prompt_taps(spec), jnp.asarray(lengths))
    out = []
    for step in range(steps):
        if step % BLOCK == 0 and step and not forget:
            cache = refresh(plan, cache)
        cache, seen = append(plan, cache, taps_at(cache.positions(), PROMPT + step, PROMPT + step + 1, spec))
        out.append(seen)
    return cache, np.concatenate(out, axis=1)


def expected(spec=SPEC, window=None, steps=16, rotated=None):
    """The same in float64 with everything that was seen."""
    rotated = rotated or (lambda x, at: np.asarray(lkv.apply_rope(spec.rope, x, jnp.asarray(at)), np.float64))
    rows = []
    for row, length in enumerate(LENGTHS):
        index = [*range(length), *range(PROMPT, PROMPT + steps)]
        at = np.arange(len(index))[None]
        q, k, v = (x[row : row + 1, index] for x in heads())
        mask = at[:, :, None] >= at[:, None]
        mask &= True if window is None else at[:, :, None] - at[:, None] < window
        out, lse = softmax_attention(rotated(q, at), rotated(k, at), v, mask, spec.scale)
        out = out * np.exp(lse - np.logaddexp(lse, SINKS))[..., None] if spec.sink_logits else out
        rows.append(out[:, length:])
    return np.concatenate(rows)


EXACT = ["full", "ojakv", "snapkv", "quest"]
EXACT += [pytest.param(name, marks=pytest.mark.slow) for name in ("palu", "osp", "h2o", "momentkv", "static-pca")]


def plans_for(name, spec=SPEC, **changes):
    method = dataclasses.replace(exact_configuration(REGISTRY[name]), **changes)
    return lkv.plan_layers(method, spec, bases=bases_for(method) if method.calibrated else None, **SIZES)


@pytest.mark.parametrize("name", EXACT)
def test_at_full_rank_and_budget_a_layer_attends_exactly(name):
    plans = plans_for(name)
    assert len(plans) == SPEC.num_layers
    cache, out = decoded(plans[0])
    np.testing.assert_allclose(out, expected(), atol=3e-5)
    assert cache.length.tolist() == [56, 45] and int(cache.pending) == 8


def test_a_sliding_window_is_the_layers():
    _, out = decoded(plans_for("ojakv")[1])
    np.testing.assert_allclose(out, expected(window=24), atol=3e-5)


def test_sink_logits_come_with_the_taps():
    spec = dataclasses.replace(SPEC, sink_logits=True)
    plan = plans_for("h2o", spec)[0]
    _, out = decoded(plan, spec)
    np.testing.assert_allclose(out, expected(spec), atol=3e-5)
    with pytest.raises(ValueError, match=r"taps.sink_logits None: must be \(8,\) of a spec with sink_logits=True"):
        lkv.prefill_layer(plan, prompt_taps())
    with pytest.raises(ValueError, match=r"taps.sink_logits \(8,\): must be None of a spec with sink_logits=False"):
        lkv.prefill_layer(plans_for("h2o")[0], prompt_taps(spec))


def test_layers_that_share_a_store_are_appended_to_in_turn():
    spec = dataclasses.replace(SPEC, num_layers=2, windows=(None, None))
    (plan,) = plans_for("xkv", spec, group=2)
    cache = lkv.prefill_layer(plan, [prompt_taps(spec), prompt_taps(spec, seed=1)], np.asarray(LENGTHS))
    for step in range(4):
        at = cache.positions()
        for seed in (0, 1):
            taps = taps_at(at, PROMPT + step, PROMPT + step + 1, spec, seed)
            cache, out = append(plan, cache, taps)
            if seed == 0:
                np.testing.assert_allclose(out[:, 0], expected(spec, steps=4)[:, step], atol=3e-5)
                with pytest.raises(ValueError, match="refresh after layer 1 of a group of 2: append to all"):
                    lkv.refresh_layer(plan, cache)
    assert cache.length.tolist() == [44, 33]
    with pytest.raises(ValueError, match="taps of 1 layers: this plan is of 2 layers"):
        lkv.prefill_layer(plan, prompt_taps(spec))


# ---- the guard ------------------------------------------------------------------------------------------------------


def test_what_no_slot_is_left_for_is_nan():
    plan = plans_for("static-pca")[0]
    _, out = decoded(plan, steps=BLOCK + 2, forget=True)  # finite and wrong without the guard
    assert np.isfinite(out[:, :BLOCK]).all() and np.isnan(out[:, BLOCK:]).all()
    cache, _ = decoded(plan, steps=BLOCK + 1, forget=True)
    cache = refresh(plan, cache)
    _, late = append(plan, cache, taps_at(cache.positions(), 0, 1))
    assert np.isnan(late).all()  # a late refresh brings nothing back
    _, out = decoded(lkv.plan_layers("kivi", SPEC, **SIZES | {"capacity": 48})[0], steps=12)
    assert np.isnan(out[0, 8:]).all() and np.isfinite(out[:, :8]).all()  # row 0 is at its capacity


def test_rows_that_append_nothing_stay_as_they_are():
    plan = plans_for("full")[0]
    cache = lkv.prefill_layer(plan, prompt_taps(), np.asarray(LENGTHS))
    cache, _ = append(plan, cache, taps_at(cache.positions(4), 0, 4), jnp.asarray([4, 0]))
    assert cache.length.tolist() == [44, 29] and int(cache.pending) == 4
    _, out = append(plan, cache, taps_at(cache.positions(2), 0, 2), jnp.asarray([2, 3]))
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()  # 3 of 2


def test_rows_are_repeated_and_taken():
    plan = plans_for("full")[0]
    cache = lkv.prefill_layer(plan, prompt_taps(), np.asarray(LENGTHS))
    one = lkv.take_rows(lkv.fork(cache, 2), [2])
    taps = jax.tree.map(lambda x: x[1:], taps_at(cache.positions(), PROMPT, PROMPT + 1))
    _, out = append(plan, one, taps)
    np.testing.assert_allclose(out[0, 0], expected(steps=1)[1, 0], atol=3e-5)
    used = lkv.cache_bytes([cache] * SPEC.num_layers)
    assert used.full == lkv.full_cache_bytes(SPEC, 2 * TOTAL) and used.by_kind["exact"] > 0


def test_coefficients_may_lie_on_lanes():
    plan = plans_for("static-pca")[0]
    cache = lkv.with_token_layout(lkv.prefill_layer(plan, prompt_taps(), np.asarray(LENGTHS)), "lanes")
    for step in range(9):
        if step == 8:
            cache = refresh(plan, cache)
        cache, out = append(plan, cache, taps_at(cache.positions(), PROMPT + step, PROMPT + step + 1))
    np.testing.assert_allclose(out[:, 0], expected(steps=9)[:, -1], atol=3e-5)
    assert cache.layout.tokens == "lanes"


def test_one_plan_serves_any_number_of_rows_and_traces_once_for_each():
    @jax.jit
    @chex.assert_max_traces(n=2)
    def step(plan, cache, taps):
        return lkv.append_and_attend(plan, cache, taps)

    for rows in (2, 1, 2, 1):
        plan = plans_for("ojakv")[0]  # made anew, it is the same to a compiled function
        first = functools.partial(jax.tree.map, lambda x, rows=rows: x[:rows])
        cache = lkv.prefill_layer(plan, first(prompt_taps()), jnp.asarray(LENGTHS[:rows]))
        cache, out = step(plan, cache, first(taps_at(jnp.asarray(LENGTHS)[:, None], PROMPT, PROMPT + 1)))
        np.testing.assert_allclose(out, expected(steps=1)[:rows], atol=3e-5)
        assert cache.layout.batch == rows
    with pytest.raises(ValueError, match="batch=0: must be at least 1"):
        lkv.prefill_layer(plan, jax.tree.map(lambda x: x[:0], prompt_taps()))


# ---- layers in a loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ojakv", pytest.param("snapkv", marks=pytest.mark.slow)])
def test_layers_of_one_kind_are_scanned(name):
    spec = dataclasses.replace(SPEC, windows=(None,) * 3)
    plans = plans_for(name, spec)
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    prompts = stack([prompt_taps(spec, seed) for seed in range(3)])

    @jax.jit
    def prefilled(plans, taps):
        return jax.lax.map(lambda own: lkv.prefill_layer(own[0], own[1], jnp.asarray(LENGTHS)), (plans, taps))

    @jax.jit
    def appended(plans, caches, new):
        return jax.lax.scan(lambda _, own: (None, lkv.append_and_attend(*own)), None, (plans, caches, new))[1]

    at = jnp.asarray(LENGTHS)[:, None]
    new = [taps_at(at, PROMPT, PROMPT + 1, spec, seed) for seed in range(3)]
    stacked, tokens = stack(plans), stack(new)
    caches, out = appended(stacked, prefilled(stacked, prompts), tokens)
    for seed, plan in enumerate(plans):
        cache = lkv.prefill_layer(plan, prompt_taps(spec, seed), jnp.asarray(LENGTHS))
        np.testing.assert_allclose(out[seed], append(plan, cache, new[seed])[1], atol=2e-5)
    for _ in range(BLOCK - 1):
        caches, out = appended(stacked, caches, tokens)
    assert np.isfinite(out).all() and np.isnan(appended(stacked, caches, tokens)[1]).all()  # no refresh in time
    refreshed = jax.jit(lambda *own: jax.lax.map(lambda one: lkv.refresh_layer(*one), own))(stacked, caches)
    assert np.isfinite(appended(stacked, refreshed, tokens)[1]).all()


# ---- interleaved RoPE -----------------------------------------------------------------------------------------------


def interleaved_numpy(spec):
    """Channels 2i and 2i + 1 as a complex number, turned; float64 and of nothing but the definition."""

    def rotated(x, at):
        x = np.array(x, np.float64)
        angle = np.asarray(at)[:, :, None, None] * spec.rope.theta ** -(np.arange(0, spec.rope.rotary_dim, 2) / spec.rope.rotary_dim)
        first, second = x[..., : spec.rope.rotary_dim : 2].copy(), x[..., 1 : spec.rope.rotary_dim : 2].copy()
        x[..., : spec.rope.rotary_dim : 2] = first * np.cos(angle) - second * np.sin(angle)
        x[..., 1 : spec.rope.rotary_dim : 2] = second * np.cos(angle) + first * np.sin(angle)
        return x

    return rotated


PRE_ROPE = [pytest.param("ojakv", {"rope": "pre"}, marks=pytest.mark.slow), ("palu", {}), ("osp", {"rope": "pre"}), ("xkv", {"group": 1}),
            pytest.param("static-pca-h", {"rope": "pre"}, marks=pytest.mark.slow)]  # read as palu's are


@pytest.mark.parametrize("name, changes", PRE_ROPE, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("rotary_dim", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_interleaved_rope_is_read_as_it_was_written(name, changes, rotary_dim):
    spec = dataclasses.replace(SPEC, rope=lkv.RopeSpec(10000.0, rotary_dim, interleaved=True))
    rotated = interleaved_numpy(spec)
    at = jnp.asarray([[5, 900]])
    np.testing.assert_allclose(lkv.apply_rope(spec.rope, heads()[1][:1, :2], at), rotated(heads()[1][:1, :2], at), atol=1e-4)
    _, out = decoded(plans_for(name, spec, **changes)[0], spec)
    np.testing.assert_allclose(out, expected(spec, rotated=rotated), atol=1e-4)


def test_a_rotation_that_the_spec_does_not_say_is_told():
    taps, at = prompt_taps(), jnp.broadcast_to(jnp.arange(PROMPT), (2, PROMPT))
    lkv.check_rotation(SPEC, taps, at)
    half = lkv.Taps(*(None if x is None else x.astype(jnp.bfloat16) for x in taps))
    lkv.check_rotation(SPEC, half, at)
    for wrong in (dataclasses.replace(SPEC.rope, interleaved=True), dataclasses.replace(SPEC.rope, theta=5e5), None):
        with pytest.raises(ValueError, match=r"taps.k: differs from taps.k_pre rotated by .* of its norm"):
            lkv.check_rotation(dataclasses.replace(SPEC, rope=wrong), taps, at)
    order = half_split_channels(lkv.RopeSpec(100.0, 4, interleaved=True), jnp.arange(6))
    assert order.tolist() == [0, 2, 1, 3, 4, 5]
    with pytest.raises(ValueError, match="rope.interleaved=True: these decoders pair"):
        dataclasses.replace(PLAIN, rope=lkv.RopeSpec(10000.0, 8, interleaved=True))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, message", [
    ({"q_heads": 7}, "q_heads=7: must be a multiple of kv_heads=4"),
    ({"kv_heads": 0}, "kv_heads=0: must be a positive integer"),
    ({"head_dim": 6.0}, "head_dim=6.0: must be a positive integer"),
    ({"windows": (None,)}, "must hold one entry for each of 3 layers"),
    ({"windows": (None, 0, None)}, r"windows\[1\]=0: must be a positive"),
    ({"head_dim": 4}, "rope.rotary_dim=8: must be at most head_dim=4"),
])
def test_an_attention_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("changes, message", [
    ({"capacity": 30}, "capacity=30: the prompt has 40 tokens; capacity must be at least that"),
    ({"capacity": 1000}, "capacity=1000: the model's context is 512"),
    ({"block": 0}, "block=0: must be at least 1"),
    ({"prompt": 0}, "prompt=0: must be at least 1"),
])
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        lkv.plan_layers("full", SPEC, **SIZES | changes)


def test_other_shapes_and_caches_than_the_plans_are_refused():
    plan, other = plans_for("full")[0], plans_for("snapkv")[0]
    taps, cache = prompt_taps(), lkv.prefill_layer(plan, prompt_taps())
    with pytest.raises(ValueError, match=r"taps.k \(2, 40, 8, 8\): must be \(2, 40, 4, 8\)"):
        lkv.prefill_layer(plan, taps._replace(k=taps.q))
    with pytest.raises(ValueError, match="lengths.1.=41: every row needs 1..40"):
        lkv.prefill_layer(plan, taps, np.asarray([40, 41]))
    with pytest.raises(ValueError, match="40 tokens at once: the cache takes 1..8"):
        lkv.append_and_attend(plan, cache, taps)
    with pytest.raises(ValueError, match="this cache was made by"):
        lkv.append_and_attend(other, cache, taps_at(cache.positions(), 0, 1))
    with pytest.raises(ValueError, match="needs calibrated bases.*Calibrator"):
        lkv.plan_layers("ojakv:rank=0.5", SPEC, **SIZES)
    with pytest.raises(TypeError, match="dtype='int8': must be a floating dtype"):
        lkv.plan_layers("full", SPEC, **SIZES | {"dtype": "int8"})


def test_rows_of_caches_that_stand_elsewhere_are_not_joined():
    """Between two layers of a group a row holds a token more in one of them; a prompt that goes on has no end yet."""
    cache = lkv.prefill_layer(lkv.plan_layers("full", SPEC, **SIZES)[0], prompt_taps())
    assert lkv.insert_rows(cache, cache).length.shape == (4,)
    for change, words in (({"turn": 1}, "turn=0 and turn=1: both must stand before the same layer"),
                          ({"goes_on": True}, "goes_on=False and goes_on=True: the prompts of both must go on, or of none")):
        other = dataclasses.replace(cache, **change)
        for pair in ((cache, other), (other, cache)):
            with pytest.raises(ValueError, match=words if pair[0] is cache else next(iter(change))):
                lkv.insert_rows(*pair)
