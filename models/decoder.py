"""One decoder for the Llama-like families: RMS norm, grouped-query attention with RoPE, gated MLP or experts.

The modules are Flax NNX and describe what is computed. The weights that move through `jax.jit` are plain
pytrees (nested dicts of arrays): they are bound to the modules inside a trace, where binding costs nothing at
run time. Attention itself is left out: a caller takes the taps of a layer, attends through a cache of its
choice and hands the result back. The whole forward pass:

    x = embed(config, params, tokens)
    for layer in params["layers"]:
        taps = block_taps(config, layer, x, positions)
        x = block_output(config, layer, x, attend(taps))
    logits = unembed(config, params, x)

Weights: `params = {"embed": .., "layers": (layer0, layer1, ..), "norm": .., ["head": ..]}`. Layers of one kind have
one tree structure and one set of shapes, so a function of one layer traces once for all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lowrank_kv_jax.attention.rope import apply_rope
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.deepseek import LatentBlock
from lowrank_kv_jax.models.deepseek_config import DeepseekConfig
from lowrank_kv_jax.models.experts import feed_forward
from lowrank_kv_jax.models.gpt import GPTBlock, LayerNorm
from lowrank_kv_jax.models.gpt_config import GPTConfig
from lowrank_kv_jax.models.layers import rms_norm
from lowrank_kv_jax.models.linear import Linear
from lowrank_kv_jax.models.parameters import ParamInfo, param_table, params_of, stored_arrays
from lowrank_kv_jax.storage.cache_dtype import floating

Attend = Callable[..., jax.Array]


class Attention(nnx.Module):
    """The projections around attention; what happens between q, k, v and the output belongs to the cache."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        queries, keys = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        self.config = config
        self.q_proj = Linear(config.hidden_size, queries, use_bias=config.qkv_bias, rngs=rngs)
        self.k_proj = Linear(config.hidden_size, keys, use_bias=config.qkv_bias, rngs=rngs)
        self.v_proj = Linear(config.hidden_size, keys, use_bias=config.qkv_bias, rngs=rngs)
        self.o_proj = Linear(queries, config.hidden_size, use_bias=config.o_bias, rngs=rngs)
        if config.qk_norm:
            self.q_norm, self.k_norm = rms_norm(config, config.head_dim), rms_norm(config, config.head_dim)
        if config.sink_logits:
            self.sinks = nnx.Param(jnp.zeros((config.q_heads,)))

    def taps(self, x: jax.Array, positions: jax.Array) -> Taps:
        """Project normed hidden states `x` `[B, T, H]` at `positions` `[B, T]`."""
        config = self.config
        q = self.q_proj(x).reshape(*x.shape[:-1], config.q_heads, config.head_dim)
        k = self.k_proj(x).reshape(*x.shape[:-1], config.kv_heads, config.head_dim)
        v = self.v_proj(x).reshape(*x.shape[:-1], config.kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        after = apply_rope(config.rope, q, positions)
        if config.rope is not None and config.rope_magnitude != 1:
            # the factor stands on both sides of the product: squared on one, rotations stay rotations
            turned = jnp.arange(config.head_dim) < config.rope.rotary_dim
            after = after * jnp.where(turned, config.rope_magnitude**2, 1.0).astype(after.dtype)
        sinks = self.sinks[...].astype(jnp.float32) if config.sink_logits else None
        return Taps(q=after, k=apply_rope(config.rope, k, positions), k_pre=k, v=v, x=x, sink_logits=sinks)

    def output(self, attention: jax.Array) -> jax.Array:
        """Mix the heads of `[B, T, N, D]` into `[B, T, H]`."""
        return self.o_proj(attention.reshape(*attention.shape[:-2], -1))


class Block(nnx.Module):
    """One pre-norm layer, cut in two where attention happens."""

    def __init__(self, config: ModelConfig, routed: bool, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = rms_norm(config)
        self.mlp = feed_forward(config, routed, rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = rms_norm(config), rms_norm(config)

    def taps(self, x: jax.Array, positions: jax.Array) -> Taps:
        return self.attention.taps(self.attention_norm(x), positions)

    def output(self, x: jax.Array, attention: jax.Array) -> jax.Array:
        attended = self.attention.output(attention.astype(x.dtype))
        x = x + (self.attention_post_norm(attended) if self.post_norms else attended)
        out = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_post_norm(out) if self.post_norms else out)

    def prefill(self, x: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, Taps]:
        taps = self.taps(x, positions)
        sinks = () if taps.sink_logits is None else (taps.sink_logits,)
        return self.output(x, attend(taps.q, taps.k, taps.v, *sinks)), taps


class Decoder(nnx.Module):
    """What surrounds the blocks: embedding, final norm and output head. Blocks are bound one by one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        of_gpt = isinstance(config, GPTConfig)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps) if of_gpt else rms_norm(config)
        self.scale, self.cap = config.embed_scale, config.output_cap
        self.learned = isinstance(config, GPTConfig) and config.learned_positions
        if self.learned:
            self.positions = nnx.Embed(config.context, config.hidden_size, rngs=rngs)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)
        self.tied = config.tie_embeddings

    def hidden(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        # not `self.embed(tokens)`: nnx.Embed casts to the dtype it was made with; bound weights may be bf16
        table = self.embed.embedding[...]
        # an id outside of the vocabulary becomes NaN, one below 0 too, which would count from the end
        x = jnp.take(table, jnp.where(tokens < 0, table.shape[0], tokens), axis=0, mode="fill")
        x = x if self.scale == 1 else x * jnp.asarray(self.scale, x.dtype)
        return x + jnp.take(self.positions.embedding[...], positions, axis=0) if self.learned else x

    def logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        # the products of bf16 weights are summed and returned in float32: sampling reads the logits
        if self.tied:
            out = jnp.einsum("...h,vh->...v", x, self.embed.embedding[...], preferred_element_type=jnp.float32)
        else:
            out = jnp.einsum("...h,hv->...v", x, self.head.kernel[...], preferred_element_type=jnp.float32)
        return out if self.cap is None else self.cap * jnp.tanh(out / self.cap)


@functools.lru_cache(maxsize=32)
def _graphdef(module: Callable[..., nnx.Module], *args: Any) -> nnx.GraphDef:
    """The static part of `module(*args, rngs)`, made without allocating a weight."""
    return nnx.split(nnx.eval_shape(lambda: module(*args, nnx.Rngs(0))))[0]


def _block(config: ModelConfig, layer_params: dict) -> Any:
    """A layer's module with its weights."""
    if isinstance(config, GPTConfig):
        return _bind(layer_params, GPTBlock, config)
    kind = LatentBlock if isinstance(config, DeepseekConfig) else Block
    return _bind(layer_params, kind, config, "experts" in layer_params["mlp"])


def _bind(weights: dict, module: Callable[..., nnx.Module], *args: Any):
    """`module(*args, rngs)` with these weights."""
    return nnx.merge(_graphdef(module, *args), weights)


def _surroundings(params: dict) -> dict:
    return {name: entry for name, entry in params.items() if name != "layers"}


def embed(config: ModelConfig, params: dict, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """Hidden states `[B, T, H]` in the dtype of the weights.

    Args:
        tokens: int32 `[B, T]`.
        positions: int32 `[B, T]`, read where positions are learned; None counts from 0.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    return _bind(_surroundings(params), Decoder, config).hidden(tokens, positions)


def block_taps(config: ModelConfig, layer_params: dict, x: jax.Array, positions: jax.Array) -> Taps:
    """What a layer exposes of the residual stream `x` `[B, T, H]` at int32 `positions` `[B, T]`."""
    return _block(config, layer_params).taps(x, positions)


def block_output(config: ModelConfig, layer_params: dict, x: jax.Array, attention: jax.Array) -> jax.Array:
    """The residual stream `[B, T, H]` after a layer.

    Args:
        config: the model.
        layer_params: one entry of `params["layers"]`.
        x: the residual stream that `block_taps` was given, `[B, T, H]`.
        attention: the attended values of each query head, `[B, T, N, D]`, any float dtype.
    """
    return _block(config, layer_params).output(x, attention)


def block_prefill(
    config: ModelConfig, layer_params: dict, x: jax.Array, positions: jax.Array, attend: Attend
) -> tuple[jax.Array, Taps]:
    """A layer over a whole prompt: the residual stream after it, and its taps.

    Args:
        attend: exact causal attention of queries `[B, T, N, D]` over keys and values `[B, T, K, D]` of one
            dimension, with the model's softmax scale. Latent attention is given whole heads: it costs less so
            than with the absorbed queries that its cache is read with. Where a model has sink logits, they are
            its fourth argument, float32 `[N]`.
    """
    return _block(config, layer_params).prefill(x, positions, attend)


def unembed(config: ModelConfig, params: dict, x: jax.Array) -> jax.Array:
    """float32 logits `[B, T, V]` of the residual stream `x` `[B, T, H]` after the last layer."""
    return _bind(_surroundings(params), Decoder, config).logits(x)


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random weights: matrices normal with deviation 1 / sqrt(fan in), norms of factor 1, biases small, sinks normal."""
    dtype = floating(dtype)
    keys = iter(jax.random.split(key, len(stored_arrays(config))))

    def draw(info: ParamInfo) -> jax.Array:
        key = next(keys)
        if info.hf.endswith("bias"):
            return 0.02 * jax.random.normal(key, info.shape, dtype)
        if len(info.shape) >= 2:
            ins = -2 if info.transposed or len(info.shape) == 3 else -1
            return jax.random.normal(key, info.shape, dtype) * info.shape[ins] ** -0.5
        if info.hf.endswith(".sinks"):
            return jax.random.normal(key, info.shape, dtype)
        return jnp.full(info.shape, 1 - config.norm_offset, dtype)

    return params_of(config, draw)


def param_axes(config: ModelConfig) -> dict:
    """The parameter tree with the logical axis names of each array in its place (see `ParamInfo.axes`)."""
    return jax.tree.map(lambda leaf: leaf.axes, param_table(config))
