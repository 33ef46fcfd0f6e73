"""A mixture of experts (DeepSeekMoE; Mixtral, Qwen3 and gpt-oss without shared experts)."""

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
        self.router = Linear(hidden, count, use_bias=self.moe.biases, rngs=rngs)
        shapes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        weights = {name: (count, *shape) for name, shape in shapes.items()}
        biases = {f"{name}_bias": (count, outs) for name, (_, outs) in shapes.items() if self.moe.biases}
        self.experts = nnx.Dict({name: nnx.Param(jnp.zeros(shape)) for name, shape in {**weights, **biases}.items()})
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
        logits = logits + self.router.bias[...].astype(jnp.float32) if moe.biases else logits
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
        inner = self._gated(*(jnp.einsum("th,tkhi->tki", tokens, w) for w in (gate, up)), chosen)
        weights = weights.astype(tokens.dtype)
        out = jnp.einsum("tki,tkih,tk->th", inner, down, weights)
        return out + jnp.einsum("tkh,tk->th", self._bias("down", chosen), weights) if self.moe.biases else out

    def _sorted(self, tokens: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Many tokens: sorted by expert, every expert multiplies its own."""
        order = jnp.argsort(chosen.reshape(-1))
        owner, expert = order // chosen.shape[1], chosen.reshape(-1)[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=self.moe.count).astype(jnp.int32)
        gate, up, down = (self.experts[name][...] for name in ("gate", "up", "down"))
        x = tokens[owner]
        inner = self._gated(*(jax.lax.ragged_dot(x, w, sizes) for w in (gate, up)), expert)
        out = jax.lax.ragged_dot(inner, down, sizes)
        out = out + self._bias("down", expert) if self.moe.biases else out
        out = out * weights.reshape(-1)[order, None].astype(tokens.dtype)
        return jnp.zeros_like(tokens).at[owner].add(out)

    def _gated(self, gate: jax.Array, up: jax.Array, experts: jax.Array) -> jax.Array:
        """What enters an expert's last map, `[..., I]`, of the products with its first two; experts int32 `[...]`."""
        if self.moe.biases:
            gate, up = gate + self._bias("gate", experts), up + self._bias("up", experts)
        if self.moe.clamp is None:
            return jax.nn.silu(gate) * up
        alpha, limit = self.moe.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))

    def _bias(self, name: str, experts: jax.Array) -> jax.Array:
        """Of experts `[...]`, `[..., out]`."""
        return self.experts[f"{name}_bias"][...][experts]


def feed_forward(config: ModelConfig, routed: bool, rngs: nnx.Rngs) -> nnx.Module:
    """What stands behind attention in a layer: experts, or the gated MLP."""
    if routed:
        return Experts(config, rngs)
    return MLP(config.hidden_size, config.intermediate_size, rngs, config.mlp_bias, config.mlp_activation)
