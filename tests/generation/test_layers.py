"""A layer's step as a GPU is given it, beside that of a CPU."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.generation import layers
from lowrank_kv_jax.generation.forward import extend, make_layout, prefill
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.method.cache import fork
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.models.experts_config import ExpertsConfig
from lowrank_kv_jax.testing.models import PLAIN, model, prompts
from lowrank_kv_jax.testing.moments import bases_for

METHOD = as_method("full")
STEP = layers.layer_extend.__wrapped__


def shapes_and_answer(config, rows, tokens):
    """What the first projection is given, and the step's answer."""
    layout = make_layout(config, rows, 4, 20, block=8, dtype="float32")
    weights = init_params(config, jax.random.key(0))["layers"][0]
    state = machine_of(METHOD).init(layout, None)
    x = jax.random.normal(jax.random.key(1), (rows, tokens, config.hidden_size))
    positions, counts = jnp.broadcast_to(jnp.arange(tokens), (rows, tokens)), jnp.full((rows,), tokens, jnp.int32)

    def step(x):
        return STEP(config, METHOD, layout, Place(), weights, None, state, x, positions, counts)

    lines = str(jax.make_jaxpr(step)(x)).splitlines()
    products = [line.partition(":")[2] for line in lines if "dot_general" in line]  # but for their variables' names
    return products, jax.jit(step)(x)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (2, 2)])
def test_few_rows_are_multiplied_as_several(rows, tokens, monkeypatch):
    config = dataclasses.replace(PLAIN, sink_logits=True)
    before, expected = shapes_and_answer(config, rows, tokens)
    monkeypatch.setattr(layers, "on_gpu", lambda: True)
    products, found = shapes_and_answer(config, rows, tokens)
    assert (products == before) == (rows * tokens >= layers.LEAST_ROWS)
    assert len(products) == len(before)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_experts_are_given_no_more_tokens_than_there_are(monkeypatch):
    monkeypatch.setattr(layers, "on_gpu", lambda: True)
    config, x = dataclasses.replace(PLAIN, moe=ExpertsConfig(4, 2, 16, (0,))), jnp.zeros((1, 1, PLAIN.hidden_size))
    (plain, *_), (routed, *_) = (init_params(each, jax.random.key(0))["layers"] for each in (PLAIN, config))
    assert len(layers._enough_rows(plain, x)) == layers.LEAST_ROWS and layers._enough_rows(routed, x) is x


@pytest.mark.parametrize("spec", [
    pytest.param("transform:bits=3,group=3+kvzip:keep=0.5+moments", marks=pytest.mark.slow), "xkv:group=3,rank=12,bits=8"])
def test_layers_of_a_group_share_a_program(spec):
    method, params = as_method(spec), model().params
    bases, tokens = bases_for(method), prompts(2, 40)
    cache, _ = prefill(method, PLAIN, params, tokens, bases=bases, capacity=60, block=8, dtype="float32")
    whole = jax.jit(lambda cache, tokens: extend(method, PLAIN, params, cache, tokens, bases=bases))
    expected = whole(cache, tokens[:, :5])
    before = layers.layer_extend._cache_size()
    found = extend(method, PLAIN, params, fork(cache), tokens[:, :5], bases=bases)
    assert layers.layer_extend._cache_size() == before + 1
    chex.assert_trees_all_close(found, expected, atol=2e-5)
