"""Modules that every family's layers are made of."""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.linear import Linear, LinearPair


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32; its factor is `offset` more than its weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        self.scale = nnx.Param(jnp.ones((size,)))
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """A norm of the residual stream, or of `size` channels, as the family has them."""
    return RMSNorm(size or config.hidden_size, config.norm_eps, config.norm_offset)


class MLP(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x)), the activation "silu" or "gelu_tanh"."""

    def __init__(self, hidden: int, inner: int, rngs: nnx.Rngs, bias: bool = False, activation: str = "silu"):
        self.gate_up = LinearPair(hidden, inner, bias)
        self.down = Linear(inner, hidden, use_bias=bias, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_up(x)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down(gate * up)
