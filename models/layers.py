"""Modules that every family's layers are made of."""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_kv_jax.models.linear import Linear


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class MLP(nnx.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, rngs: nnx.Rngs, bias: bool = False):
        self.gate = Linear(hidden, inner, use_bias=bias, rngs=rngs)
        self.up = Linear(hidden, inner, use_bias=bias, rngs=rngs)
        self.down = Linear(inner, hidden, use_bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
