"""Sums in parts: closer to float64 than one after the other, and only where that was asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lowrank_kv_jax.models.linear import PARTS, Linear


def layer(inner: int, outer: int = 64, bias: bool = False) -> Linear:
    return Linear(inner, outer, use_bias=bias, rngs=nnx.Rngs(0))


def products(module: Linear, x: jax.Array, precision: str) -> int:
    with jax.default_matmul_precision(precision):
        return str(jax.make_jaxpr(module)(x)).count("dot_general")


@pytest.mark.parametrize("inner, precision, expected", [
    (2048, "highest", PARTS), (2048, "default", 1), (64, "highest", 1), (2047, "highest", 1),
])
def test_only_long_sums_at_highest_precision_are_made_in_parts(inner, precision, expected):
    assert products(layer(inner), jnp.ones((1, inner)), precision) == expected


def test_weights_that_may_lie_on_several_devices_are_not_cut(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert products(layer(2048), jnp.ones((1, 2048)), "highest") == 1


def test_half_precision_weights_are_summed_in_one_product():
    module = layer(2048)
    module.kernel = nnx.Param(module.kernel[...].astype(jnp.bfloat16))
    assert products(module, jnp.ones((1, 2048), jnp.bfloat16), "highest") == 1


@pytest.mark.parametrize("bias", [False, True])
def test_sums_in_parts_are_closer_to_float64(bias):
    module, x = layer(4096, bias=bias), jax.random.normal(jax.random.key(1), (1, 4096))
    expected = np.asarray(x, np.float64) @ np.asarray(module.kernel[...], np.float64)
    if bias:
        module.bias = nnx.Param(jnp.arange(64.0))
        expected = expected + np.arange(64.0)

    def error(precision: str) -> float:
        with jax.default_matmul_precision(precision):
            return float(np.sqrt(np.mean((np.asarray(jax.jit(module)(x)) - expected) ** 2)))

    assert error("highest") <= error("default") < 1e-4
    assert error("highest") < 1e-5
