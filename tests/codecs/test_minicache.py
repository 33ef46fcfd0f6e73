"""MiniCache: SLERP, what is retained, what it weighs."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, PLAIN, PROMPT, compress, model, prompts, run

from lowrank_kv_jax import methods
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import make_layout, prefill
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.token_share import rounded_with_share, share_of
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.segments.merged import angle, layer_tokens, slerp

DEEP = dataclasses.replace(PLAIN, num_layers=4, windows=(None,) * 4)


def test_slerp_moves_along_the_great_circle():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(50, 8)), jnp.float32) for _ in range(2))
    for t in (0.0, 0.3, 0.6, 1.0):
        z = slerp(x, y, t)
        np.testing.assert_allclose(jnp.linalg.norm(z, axis=-1), 1, atol=1e-5)
        np.testing.assert_allclose(angle(x, z), t * angle(x, y), atol=2e-3)
        np.testing.assert_allclose(angle(z, y), (1 - t) * angle(x, y), atol=2e-3)


def test_slerp_of_equal_opposite_and_zero_vectors_is_finite():
    x = jnp.array([[1.0, 2.0, 0.0]])
    np.testing.assert_allclose(slerp(x, 3 * x, 0.6), x / jnp.linalg.norm(x), atol=1e-6)
    for y in (-x, 0 * x):
        assert np.isfinite(slerp(x, y, 0.6)).all() and np.isfinite(slerp(y, y, 0.6)).all()


def taps_of(k, v):
    return Taps(k, k, k, v, v)


def compressed(method, first, second, lengths):
    layout = make_layout(DEEP, *first.k.shape[:2], 80, dtype=jnp.float32)
    group = method.default_bases(DEEP.attention)[-1]
    return compress(machine_of(method), layout, group, (first, second), jnp.array(lengths))


def random_taps(rows=2, size=64, seed=0):
    rng = np.random.default_rng(seed)
    return taps_of(*(jnp.asarray(rng.normal(size=(rows, size, 4, 8)), jnp.float32) for _ in "kv"))


def test_layers_that_differ_in_magnitude_only_lose_nothing():
    """The assumption of the paper, fulfilled exactly: keys and values of both layers are recovered."""
    first = random_taps()
    second = first._replace(k=2 * first.k, v=-0.5 * first.v * -1)
    state = compressed(methods.MiniCache(keep=0.0), first, second, [64, 64])
    for index, tap in enumerate((first, second)):
        tokens = layer_tokens(state.store.merged, index)
        np.testing.assert_allclose(tokens.keys.read_block(0, 64), tap.k.swapaxes(1, 2), atol=1e-5)
        np.testing.assert_allclose(tokens.values.read_block(0, 64), tap.v.swapaxes(1, 2), atol=1e-5)


@pytest.mark.parametrize("retain, index", [("distant", [5, 11]), ("similar", [0, 1])])
def test_which_tokens_are_retained(retain, index):
    first = random_taps()
    noise = random_taps(seed=1)
    far = jnp.zeros((64,)).at[jnp.array([5, 11])].set(3.0) + 0.1
    far = far.at[jnp.array([0, 1])].set(0.0)[None, :, None, None]
    second = first._replace(k=first.k + far * noise.k, v=first.v + far * noise.v)
    state = compressed(methods.MiniCache(budget=2, retain=retain), first, second, [64, 40])
    np.testing.assert_array_equal(state.store.positions.position, [index, index])
    np.testing.assert_array_equal(state.store.length, [2, 2])
    np.testing.assert_array_equal(state.store.merged.length, [62, 38])
    np.testing.assert_allclose(state.store.retained[1].k[0, :, 0], second.k[0, index[0]], atol=1e-6)
    rest = [i for i in range(64) if i not in index]
    np.testing.assert_array_equal(state.store.merged.positions.position[0], rest)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.999, 1 / 3])
def test_shares_of_many_tokens_are_exact(share):
    tokens = np.array([0, 1, 63, 20_000, 65_536, 99_999, 131_072, 1_048_580, 20_000_020])
    wanted = [int(np.floor(np.longdouble(str(share)) * n + 1e-4)) for n in tokens]
    assert [share_of(int(n), share) for n in tokens] == wanted
    assert jax.jit(lambda n: share_of(n, share))(jnp.asarray(tokens, jnp.int32)).tolist() == wanted


@pytest.mark.parametrize("share", ["0.8", "0.5", "0.25", "0.7"])
def test_rounded_shares_of_many_tokens_are_exact(share):
    tokens = np.array([0, 1, 2, 3, 5, 10, 65_537, 99_998, 1_048_577, 20_000_021, 20_000_027])
    wanted = [round(7 + Fraction(share) * int(n)) for n in tokens]
    assert jax.jit(lambda n: rounded_with_share(7, n, float(share)))(jnp.asarray(tokens, jnp.int32)).tolist() == wanted


def test_half_of_the_layers_merged_is_the_paper_s_ratio():
    config = dataclasses.replace(PLAIN, num_layers=8, windows=(None,) * 8, head_dim=64, hidden_size=64)
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, rotary_dim=64))
    cache, _ = prefill(
        methods.MiniCache(keep=0.0),
        config,
        model(config).params,
        prompts(length=480),
        capacity=496,
        block=BLOCK,
    )
    assert 1.25 < cache_bytes(cache).smaller < 1.34
    assert len(cache.groups) == 4 + 2


@pytest.mark.parametrize("fields", [
    {"start": 4}, {"start": 0, "keep": 1.0}, pytest.param({"start": 1.0}, marks=pytest.mark.slow)], ids=str)
def test_nothing_to_merge_is_the_full_cache(fields):
    tokens = prompts(length=PROMPT + 8)
    _, exact = run(methods.Full(), DEEP, tokens, PROMPT)
    _, logits = run(methods.MiniCache(**fields), DEEP, tokens, PROMPT)
    np.testing.assert_allclose(logits, exact, atol=1e-4)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("minicache:t=2.0", "t=2.0"),
        ("minicache:keep=1.5", "keep=1.5"),
        ("minicache:keep=0.1,budget=3", "at most one"),
        ("minicache:retain=near", "retain='near'"),
        ("minicache:start=-1", "start=-1"),
        ("minicache:budget=-1", "budget=-1"),
    ],
)
def test_bad_fields_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)


def test_a_start_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="start=9: the model has 4 layers"):
        methods.MiniCache(start=9).validate(DEEP.attention)
