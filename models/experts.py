"""A mixture of experts (DeepSeekMoE; Mixtral and Qwen3 without shared experts)."""

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.layers import MLP
from lowrank_kv_jax.models.linear import Linear


class Experts(nnx.Module):
    """Routed experts, of which a token passes a few, and where there are any shared ones."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        assert config.moe is not None
        self.moe, hidden = config.moe, config.hidden_size
        count, inner = self.moe.count, self.moe.size
        self.router = Linear(hidden, count, use_bias=False, rngs=rngs)
        self.experts = nnx.Dict(
            gate=nnx.Param(jnp.zeros((count, hidden, inner))),
            up=nnx.Param(jnp.zeros((count, hidden, inner))),
            down=nnx.Param(jnp.zeros((count, inner, hidden))),
        )
        if self.moe.shared:
            self.shared = MLP(hidden, inner * self.moe.shared, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(tokens)
        few = chosen.size < self.moe.count
        routed = (self._gathered if few else self._sorted)(tokens, weights, chosen).astype(x.dtype).reshape(x.shape)
        return self.shared(x) + routed if self.moe.shared else routed

    def route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights float32 and numbers of the experts of each token, `[T, k]` of `[T, H]`."""
        moe = self.moe
        logits = jnp.matmul(tokens.astype(jnp.float32), self.router.kernel[...].astype(jnp.float32))
        scores = jax.nn.softmax(logits, axis=-1)
        if moe.groups > 1:
            groups = scores.reshape(len(tokens), moe.groups, -1)
            _, best = jax.lax.top_k(groups.max(-1), moe.groups_per_token)
            allowed = jax.nn.one_hot(best, moe.groups, dtype=bool).any(1)
            scores = jnp.where(allowed[..., None], groups, 0.0).reshape(scores.shape)
        weights, chosen = jax.lax.top_k(scores, moe.per_token)
        weights = weights / weights.sum(-1, keepdims=True) if moe.normalised else weights
        return weights * moe.scale, chosen

    def _gathered(self, tokens: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Few tokens: only the weights of their experts are read."""
        gate, up, down = (self.experts[name][...][chosen] for name in ("gate", "up", "down"))
        inner = jax.nn.silu(jnp.einsum("th,tkhi->tki", tokens, gate)) * jnp.einsum("th,tkhi->tki", tokens, up)
        return jnp.einsum("tki,tkih,tk->th", inner, down, weights.astype(tokens.dtype))

    def _sorted(self, tokens: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Many tokens: sorted by expert, every expert multiplies its own."""
        order = jnp.argsort(chosen.reshape(-1))
        owner = order // chosen.shape[1]
        sizes = jnp.bincount(chosen.reshape(-1), length=self.moe.count).astype(jnp.int32)
        gate, up, down = (self.experts[name][...] for name in ("gate", "up", "down"))
        x = tokens[owner]
        inner = jax.nn.silu(jax.lax.ragged_dot(x, gate, sizes)) * jax.lax.ragged_dot(x, up, sizes)
        out = jax.lax.ragged_dot(inner, down, sizes) * weights.reshape(-1)[order, None].astype(tokens.dtype)
        return jnp.zeros_like(tokens).at[owner].add(out)


def feed_forward(config: ModelConfig, routed: bool, rngs: nnx.Rngs) -> nnx.Module:
    """What stands behind attention in a layer: experts, or the gated MLP."""
    if routed:
        return Experts(config, rngs)
    return MLP(config.hidden_size, config.intermediate_size, rngs, config.mlp_bias, config.mlp_activation)
