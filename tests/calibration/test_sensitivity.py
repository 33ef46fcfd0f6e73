"""Squared gradients of the loss by cached keys and values against grad through the whole model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, model, prompts

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.calibration.sensitivity import RECENT, SINKS, collect_sensitivity
from lowrank_kv_jax.models.decoder import block_prefill, embed, unembed

LENGTH = 48
SPEC = PLAIN.attention


def losses(errors, text, seed):
    """Mean loss of tokens that are drawn; every token is there twice, as it is and with its errors from afar."""
    tokens = text[None]
    positions, index = jnp.arange(LENGTH)[None], jnp.arange(LENGTH)
    distance = index[:, None] - index
    far = (distance >= RECENT) & (index >= SINKS)
    seen = jnp.concatenate([(distance >= 0) & ~far, far], axis=1)
    x = embed(PLAIN, model().params, tokens)
    for layer, (k_error, v_error) in zip(model().params["layers"], errors, strict=True):
        def attend(q, k, v, k_error=k_error, v_error=v_error):
            turned = rotate(k_error, *rope_angles(SPEC.rope, positions[..., None]))
            k, v = jnp.concatenate([k, k + turned], 1), jnp.concatenate([v, v + v_error], 1)
            k, v = (jnp.repeat(y, SPEC.group_size, axis=2) for y in (k, v))
            logits = jnp.where(seen, jnp.einsum("btnd,bsnd->bnts", q, k) * SPEC.scale, -jnp.inf)
            return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits), v)

        x, _ = block_prefill(PLAIN, layer, x, positions, attend)
    logp = jax.nn.log_softmax(unembed(PLAIN, model().params, x)[:, :-1])
    drawn = jax.random.categorical(jax.random.key(seed), jax.lax.stop_gradient(logp))
    return -jnp.mean(jnp.take_along_axis(logp, drawn[..., None], axis=-1))


def test_squares_are_those_of_grad_through_the_whole_model():
    texts = prompts(2, LENGTH)
    found = collect_sensitivity(model(), np.asarray(texts))
    zeros = jnp.zeros((1, LENGTH, SPEC.kv_heads, SPEC.head_dim))
    none = [(zeros, zeros)] * SPEC.num_layers
    gradient = jax.jit(jax.grad(losses))
    squares = [gradient(none, text, seed) for seed, text in enumerate(texts)]
    for layer in range(SPEC.num_layers):
        for side, name in enumerate(("k_pre", "v")):
            g = np.stack([np.asarray(square[layer][side], np.float64)[0, SINKS : LENGTH - RECENT] for square in squares])
            wanted = np.mean(g**2, axis=(0, 1))
            np.testing.assert_allclose(getattr(found, name)[layer], wanted, rtol=2e-3, atol=1e-5 * wanted.max())
    # a rotation moves squares between the channels of a pair, and keeps their sum
    half = SPEC.rope.rotary_dim // 2
    pairs = [x[..., :half] + x[..., half : 2 * half] for x in (found.k, found.k_pre)]
    np.testing.assert_allclose(*pairs, rtol=1e-4)


def test_windows_that_are_too_short_and_gradients_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="length=36: must be at least 37"):
        collect_sensitivity(model(), np.zeros((1, SINKS + RECENT), np.int32))
    params = jax.tree.map(lambda x: x, model().params)
    kernel = params["layers"][1]["attention"]["v_proj"]["kernel"]
    params["layers"][1]["attention"]["v_proj"]["kernel"] = kernel.at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="layer .* is not finite"):
        collect_sensitivity(dataclasses.replace(model(), params=params), np.asarray(prompts(1, LENGTH)))
