"""The layers of GPT-2 and GPT-NeoX: layer norms, one fused projection to q, k and v, a plain MLP."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.models.gpt_config import GPTConfig
from lowrank_kv_jax.models.linear import Linear

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class LayerNorm(nnx.Module):
    """Layer norm with a bias over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        self.scale, self.bias = nnx.Param(jnp.ones((size,))), nnx.Param(jnp.zeros((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class GPTBlock(nnx.Module):
    """One layer, cut in two where attention happens."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.config = config
        self.attention_norm = LayerNorm(hidden, config.norm_eps)
        self.qkv = Linear(hidden, 3 * hidden, rngs=rngs)
        self.o_proj = Linear(hidden, hidden, rngs=rngs)
        self.mlp_norm = LayerNorm(hidden, config.norm_eps)
        self.up = Linear(hidden, config.intermediate_size, rngs=rngs)
        self.down = Linear(config.intermediate_size, hidden, rngs=rngs)

    def taps(self, x: jax.Array, positions: jax.Array) -> Taps:
        x = self.attention_norm(x)
        q, k, v = self._split(self.qkv(x))
        if self.config.rope is None:
            return Taps(q=q, k=k, k_pre=k, v=v, x=x)
        cos, sin = (table[..., None, :] for table in rope_angles(self.config.rope, positions))
        return Taps(q=rotate(q, cos, sin), k=rotate(k, cos, sin), k_pre=k, v=v, x=x)

    def output(self, x: jax.Array, attention: jax.Array) -> jax.Array:
        attended = self.o_proj(attention.astype(x.dtype).reshape(*attention.shape[:-2], -1))
        stream = x if self.config.parallel_residual else x + attended
        inner = self.up(self.mlp_norm(stream))
        inner = self.down(jax.nn.gelu(inner, approximate=self.config.activation == "gelu_new"))
        return x + attended + inner

    def prefill(self, x: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, Taps]:
        taps = self.taps(x, positions)
        return self.output(x, attend(taps.q, taps.k, taps.v)), taps

    def _split(self, qkv: jax.Array) -> list[jax.Array]:
        """q, k and v `[B, T, N, D]`: GPT-2 stores one behind the other, GPT-NeoX those of a head side by side."""
        heads, dim = self.config.q_heads, self.config.head_dim
        if self.config.learned_positions:
            parts = qkv.reshape(*qkv.shape[:-1], 3, heads, dim)
            return [parts[..., i, :, :] for i in range(3)]
        parts = qkv.reshape(*qkv.shape[:-1], heads, 3, dim)
        return [parts[..., i, :] for i in range(3)]
