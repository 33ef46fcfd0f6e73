"""Gate and up of the MLP are one weight, whatever a checkpoint has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_families import FAMILIES, tensors_of, write_checkpoint

from lowrank_kv_jax import models
from lowrank_kv_jax.models.layers import MLP
from lowrank_kv_jax.models.linear import MANY, LinearPair


def pair(ins, outs, use_bias):
    made, rng = LinearPair(ins, outs, use_bias), np.random.default_rng(0)
    made.kernel[...] = jnp.asarray(rng.normal(size=(ins, 2, outs)), jnp.float32)
    if use_bias:
        made.bias[...] = jnp.asarray(rng.normal(size=(2, outs)), jnp.float32)
    return made


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, MANY * 16, MANY * 16 + 1])
@pytest.mark.parametrize("precision", [None, "highest"])
def test_a_pair_is_two_maps(tokens, use_bias, precision):
    """Computed at once, or one after the other where there are many tokens."""
    made, x = pair(16, 24, use_bias), np.random.default_rng(1).normal(size=(1, tokens, 16)).astype(np.float32)
    with jax.default_matmul_precision(precision):
        outs = made(jnp.asarray(x))
    for i, out in enumerate(outs):
        wanted = x @ np.asarray(made.kernel[...])[:, i] + (np.asarray(made.bias[...])[i] if use_bias else 0)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_parts_are_summed_as_of_one_map():
    """The sum over 256 channels in eight parts, where the precision is the highest."""
    made, x = pair(256, 8, False), np.random.default_rng(1).normal(size=(1, 256)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        first, second = made(jnp.asarray(x))
    wanted = np.einsum("ti,iko->kto", x.astype(np.float64), np.asarray(made.kernel[...], np.float64))
    np.testing.assert_allclose(np.stack([first, second]), wanted, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_step_multiplies_once_and_copies_no_weight(tokens):
    import flax.nnx as nnx

    graph, weights = nnx.split(MLP(64, 96, nnx.Rngs(0)))
    compiled = jax.jit(lambda weights, x: nnx.merge(graph, weights)(x)).lower(weights, jnp.zeros((1, tokens, 64))).compile()
    assert compiled.as_text().count(" dot(") <= 2
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 96 * 4


@pytest.mark.parametrize("name", [name for name in FAMILIES if "moe" not in name and name not in ("gpt_oss", "mixtral")])
def test_both_are_read_into_their_places(name, tmp_path):
    tensors = tensors_of(FAMILIES[name])
    loaded = models.load_model(write_checkpoint(tmp_path / name, name), dtype=jnp.float32)
    kernel = np.asarray(loaded.params["layers"][1]["mlp"]["gate_up"]["kernel"])
    if (fused := tensors.get("model.layers.1.mlp.gate_up_proj.weight")) is not None:
        gate, up = np.split(fused, 2)
    else:
        gate, up = (tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    np.testing.assert_array_equal(kernel, np.stack([gate.T, up.T], axis=1))
