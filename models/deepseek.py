"""Layers of DeepSeek-V2: multi-head latent attention (DeepSeek-AI, 2024, section 2.1) before experts or an MLP.

Of each token the cache holds a latent c, from which keys and values of all heads are projections W_UK c and W_UV c of
its norm, and one rotated key that the heads share. A prompt is attended with whole heads. Through the cache the
projections are absorbed, (q W_UK) c and W_UV (p c), so that latents are attended as they are; the norm's weight is
absorbed with them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import LatentSpec, Taps
from lowrank_kv_jax.models.deepseek_config import LATENT_EPS, DeepseekConfig
from lowrank_kv_jax.models.experts import feed_forward
from lowrank_kv_jax.models.layers import RMSNorm
from lowrank_kv_jax.models.linear import Linear


class LatentAttention(nnx.Module):
    """The projections around latent attention."""

    def __init__(self, config: DeepseekConfig, rngs: nnx.Rngs):
        hidden, heads = config.hidden_size, config.q_heads
        queries = heads * (config.nope_head_dim + config.rope_head_dim)
        self.config = config

        def linear(ins: int, outs: int) -> Linear:
            return Linear(ins, outs, use_bias=False, rngs=rngs)

        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, queries)
        else:
            self.q_down = linear(hidden, config.q_lora_rank)
            self.q_norm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_up = linear(config.q_lora_rank, queries)
        self.kv_down = linear(hidden, config.kv_lora_rank + config.rope_head_dim)
        self.kv_norm = RMSNorm(config.kv_lora_rank, LATENT_EPS)
        self.kv_up = linear(config.kv_lora_rank, heads * (config.nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, hidden)

    def queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Without RoPE `[B, T, N, nope]`, and rotated `[B, T, N, rope]`."""
        config = self.config
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q = q.reshape(*x.shape[:2], config.q_heads, -1)
        plain, rotary = q[..., : config.nope_head_dim], q[..., config.nope_head_dim :]
        # YaRN's factor stands on both sides of the product: squared on one, rotations stay rotations
        return plain, self._rotate(_half_split(rotary), positions) * config.rope_magnitude**2

    def cached(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Latents before their norm `[B, T, 1, r]`, the shared key before and after RoPE `[B, T, 1, rope]`."""
        down = self.kv_down(x)[:, :, None]
        latent, key = down[..., : self.config.kv_lora_rank], _half_split(down[..., self.config.kv_lora_rank :])
        return latent, key, self._rotate(key, positions)

    def taps(self, x: jax.Array, positions: jax.Array, absorbed: bool = True) -> Taps:
        """Project normed hidden states `[B, T, H]`; without `absorbed` the queries are left out."""
        latent, before, after = self.cached(x, positions)
        if absorbed:
            plain, rotary = self.queries(x, positions)
            w_uk, _ = self._absorbed(x.dtype)
            q = jnp.concatenate([rotary, jnp.einsum("btnd,rnd->btnr", plain, w_uk)], axis=-1)
        else:
            q = jnp.zeros((*x.shape[:2], self.config.q_heads, 0), x.dtype)
        normed = LatentSpec(self.config.kv_lora_rank, LATENT_EPS).normalise(latent)
        k, k_pre = jnp.concatenate([after, normed], axis=-1), jnp.concatenate([before, latent], axis=-1)
        return Taps(q=q, k=k, k_pre=k_pre, v=k[..., :0], x=x)

    def heads(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Whole queries, keys and values `[B, T, N, nope + rope]`, values filled up with zeros."""
        config = self.config
        latent, _, shared = self.cached(x, positions)
        up = self.kv_up(self.kv_norm(latent[:, :, 0])).reshape(*x.shape[:2], config.q_heads, -1)
        plain, values = up[..., : config.nope_head_dim], up[..., config.nope_head_dim :]
        keys = jnp.concatenate([jnp.broadcast_to(shared, (*plain.shape[:3], shared.shape[-1])), plain], axis=-1)
        room = max(keys.shape[-1] - config.v_head_dim, 0)
        plain, rotary = self.queries(x, positions)
        return jnp.concatenate([rotary, plain], axis=-1), keys, jnp.pad(values, ((0, 0),) * 3 + ((0, room),))

    def output(self, attention: jax.Array) -> jax.Array:
        """The heads of attended keys `[B, T, N, rope + r]` mixed into `[B, T, H]`."""
        _, w_uv = self._absorbed(attention.dtype)
        return self.mix(jnp.einsum("btnr,rnv->btnv", attention[..., self.config.rope_head_dim :], w_uv))

    def mix(self, values: jax.Array) -> jax.Array:
        """Attended values `[B, T, N, >= v]` mixed into `[B, T, H]`."""
        values = values[..., : self.config.v_head_dim]
        return self.o_proj(values.reshape(*values.shape[:2], -1))

    def _absorbed(self, dtype) -> tuple[jax.Array, jax.Array]:
        """W_UK `[r, N, nope]` and W_UV `[r, N, v]` of a latent whose norm has no weight."""
        weight = self.kv_norm.scale[...].astype(jnp.float32)[:, None] * self.kv_up.kernel[...].astype(jnp.float32)
        weight = weight.astype(dtype).reshape(weight.shape[0], self.config.q_heads, -1)
        return weight[..., : self.config.nope_head_dim], weight[..., self.config.nope_head_dim :]

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        cos, sin = (table[..., None, :] for table in rope_angles(self.config.rope, positions))
        return rotate(x, cos, sin)


def _half_split(x: jax.Array) -> jax.Array:
    """Rotary channels from adjacent pairs, as DeepSeek stores them, to the order that `rotate` pairs them in."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


class LatentBlock(nnx.Module):
    """One pre-norm layer of latent attention, cut in two where attention happens."""

    def __init__(self, config: DeepseekConfig, routed: bool, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = LatentAttention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = feed_forward(config, routed, rngs)

    def taps(self, x: jax.Array, positions: jax.Array) -> Taps:
        return self.attention.taps(self.attention_norm(x), positions)

    def output(self, x: jax.Array, attention: jax.Array) -> jax.Array:
        return self._rest(x, self.attention.output(attention.astype(x.dtype)))

    def prefill(self, x: jax.Array, positions: jax.Array, attend) -> tuple[jax.Array, Taps]:
        normed = self.attention_norm(x)
        mixed = self.attention.mix(attend(*self.attention.heads(normed, positions)))
        return self._rest(x, mixed), self.attention.taps(normed, positions, absorbed=False)

    def _rest(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))
