"""Which tokens can be drawn, how often, and that a row draws for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.generation.sampling import Sampler, sample

LOGITS = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32))
DRAWS = 4000
draw = jax.jit(sample, static_argnums=0)


def drawn(sampler, logits=LOGITS, draws=DRAWS):
    keys = jax.vmap(jax.random.key)(jnp.arange(draws))
    tokens = draw(sampler, jnp.broadcast_to(logits, (draws, len(logits))), keys, jnp.int32(0))
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / draws


@pytest.mark.parametrize(
    "sampler, expected",
    [
        (Sampler(1.0), [0.05, 0.4, 0.15, 0.3, 0.1]),
        (Sampler(0.5), np.array([0.0025, 0.16, 0.0225, 0.09, 0.01]) / 0.285),
        (Sampler(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampler(1.0, top_k=99), [0.05, 0.4, 0.15, 0.3, 0.1]),
        (Sampler(1.0, top_k=1), [0, 1, 0, 0, 0]),
        (Sampler(1.0, top_p=0.69), [0, 4 / 7, 0, 3 / 7, 0]),  # 0.4 + 0.3 reach 0.69
        (Sampler(1.0, top_p=0.75), np.array([0, 0.4, 0.15, 0.3, 0]) / 0.85),
        (Sampler(1.0, top_p=1e-6), [0, 1, 0, 0, 0]),  # the most likely token always stays
        (Sampler(1.0, top_p=1e-310), [0, 1, 0, 0, 0]),  # 0 in float32
        (
            Sampler(1.0, top_k=3, top_p=0.8),
            [0, 4 / 7, 0, 3 / 7, 0],
        ),  # top_p among the three: 0.7 / 0.85 reach 0.8
        (Sampler(0.0, top_k=3), [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_truncated_softmax(sampler, expected):
    expected = np.asarray(expected)
    frequency = drawn(sampler)
    assert not frequency[expected == 0].any()
    np.testing.assert_allclose(frequency, expected, atol=4 * np.sqrt(0.25 / DRAWS))


def test_a_row_depends_on_its_own_key_and_step_only():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(6, 50)), jnp.float32)
    keys, steps = jax.vmap(jax.random.key)(jnp.arange(6)), jnp.arange(6)
    sampler = Sampler(1.5, top_k=30, top_p=0.95)
    together = draw(sampler, logits, keys, steps)
    alone = [int(draw(sampler, logits[i : i + 1], keys[i : i + 1], steps[i : i + 1])[0]) for i in range(6)]
    assert together.tolist() == alone
    later = [draw(sampler, logits, keys, jnp.int32(step)).tolist() for step in range(20)]
    assert len({tuple(row) for row in later}) > 15


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Sampler(**{field: value})
