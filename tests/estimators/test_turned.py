"""Sums of keys after RoPE from those before it, against tokens that are turned one by one in float64."""

import numpy as np
import pytest

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.estimators.moments import Across, KeysByValues, Moments
from lowrank_kv_jax.estimators.turned import SHORTEST, lengths_to, turned, turned_around_mean
from lowrank_kv_jax.methods.parse import parse_method

HEADS, DIM = 2, 8
SPEC = AttentionSpec(3, 4, HEADS, DIM, RopeSpec(100.0, 6), 64, (None,) * 3, ropes=(RopeSpec(100.0, 6), None, RopeSpec(50.0, 8)))


def rotated(rope, x, at):
    """Tokens `[n, K * D]` at one position, as the papers write it."""
    if rope is None:
        return x
    out = x.reshape(-1, HEADS, DIM).copy()
    half = rope.rotary_dim // 2
    angle = at * rope.inverse_frequencies()
    a, b = out[..., :half].copy(), out[..., half : 2 * half].copy()
    out[..., :half] = a * np.cos(angle) - b * np.sin(angle)
    out[..., half : 2 * half] = b * np.cos(angle) + a * np.sin(angle)
    return out.reshape(x.shape)


def tokens(seed, count=5):
    return np.random.default_rng(seed).normal(size=(3, count, HEADS * DIM)) + 1.0


def moments(keys, values, groups=((0, 2),)):
    def products(x, y):
        return np.stack([own.T @ other for own, other in zip(x, y, strict=True)])

    def beside(x, group):
        return np.concatenate([x[layer] for layer in group], axis=1)

    across = {g: Across(*[beside(x, g).T @ beside(x, g) for x in (0 * keys, keys, values)]) for g in groups}
    by_values = {g: KeysByValues(*[beside(x, g).T @ beside(values, g) for x in (0 * keys, keys)]) for g in groups}
    none = np.zeros((3, HEADS, DIM, DIM))
    return Moments(keys.shape[1], 0 * products(keys, keys), products(keys, keys), products(values, values), none, none,
                   0 * keys.sum(1), keys.sum(1), values.sum(1), across=across, keys_by_values=by_values)


@pytest.mark.parametrize("positions", [1, 40, 2 * SHORTEST])
def test_sums_are_means_over_all_positions_of_texts_of_each_length(positions):
    keys, values = tokens(0), tokens(1)
    found = turned(SPEC, moments(keys, values), lengths_to(positions))
    wanted = {"k": 0.0, "k_sum": 0.0, "across": 0.0, "keys_by_values": 0.0}
    for length in lengths_to(positions):
        for at in range(length):
            now = np.stack([rotated(rope, x, at) for rope, x in zip(SPEC.ropes, keys, strict=True)])
            own, share = moments(now, values), 1 / length / len(lengths_to(positions))
            wanted["k"] = wanted["k"] + share * own.k_pre
            wanted["k_sum"] = wanted["k_sum"] + share * own.k_pre_sum
            for name in ("across", "keys_by_values"):
                wanted[name] = wanted[name] + share * getattr(own, name)[0, 2].k_pre
    for name, expected in wanted.items():
        own = getattr(found, name)
        np.testing.assert_allclose(own if name.startswith("k_") or name == "k" else own[0, 2].k, expected, atol=1e-9)
    np.testing.assert_array_equal(found.k_pre, moments(keys, values).k_pre)


def test_deviations_turn_and_the_mean_stays():
    keys, values = tokens(2), tokens(3)
    found, wanted = turned_around_mean(SPEC, moments(keys, values), 40), {"k": 0.0, "across": 0.0, "keys_by_values": 0.0}
    mean = keys.mean(1, keepdims=True)
    for at in range(40):
        now = np.stack([rotated(rope, x, at) for rope, x in zip(SPEC.ropes, keys - mean, strict=True)])
        own = moments(now + mean, values)
        for name in wanted:
            wanted[name] = wanted[name] + (own.k_pre if name == "k" else getattr(own, name)[0, 2].k_pre) / 40
    for name, expected in wanted.items():
        own = getattr(found, name)
        np.testing.assert_allclose(own if name == "k" else own[0, 2].k, expected, atol=1e-9)
    np.testing.assert_allclose(found.mean("k"), mean[:, 0])


def test_lengths_are_halved_down_to_the_shortest():
    assert lengths_to(8192) == (8192, 4096, 2048) and lengths_to(5000) == (5000, 2500, 2048) and lengths_to(9) == (9,)


def test_bases_after_rope_hold_beyond_the_texts_that_they_were_fitted_to():
    """Keys that are alike but for where they stand: in the first positions one direction holds them, further on two."""
    spec = AttentionSpec(1, 1, 1, 2, RopeSpec(2000.0, 2, "linear", 500.0), 64, (None,))
    keys, eye = np.diag([9.0, 0.0])[None], np.eye(2)
    known = Moments(64, keys, keys, eye[None], eye[None, None], eye[None, None])
    spelled = "transform:sampled=False,metric=plain,rope=post,bits=None,positions={}"
    near, far = (parse_method(spelled.format(n)).fit(spec, known)[0] for n in (1, 4096))
    assert float(near.k_scale[0, 1]) < 1e-3 * float(near.k_scale[0, 0])
    assert float(far.k_scale[0, 1]) > 0.8 * float(far.k_scale[0, 0])
