"""A codec of your own: docs/extending.md, "A codec"."""

import dataclasses

import jax.numpy as jnp

import lowrank_kv_jax as lkv
from lowrank_kv_jax.method import register
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.segments.exact import Exact
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.state import state


@state
class Eighths:
    """The store of one layer: a segment with k, v `[B, K, S, D]`, length and positions."""

    tokens: Exact


@register("float8")
@dataclasses.dataclass(frozen=True)
class Float8(TokenCodec):
    """Keys after RoPE and values as float8_e4m3fn."""

    def ends(self, layout, bases):           # exact tokens: 4 sinks, 32 recent ones
        return Ends(4, 32)

    def units(self, spec, bases):            # every kv head is coded by itself
        return spec.kv_heads

    def empty(self, layout, bases, size, positions=None):
        heads = layout.spec.kv_heads if positions is None else positions.position.shape[1]
        buffer = jnp.zeros((layout.batch, heads, size, layout.spec.head_dim), jnp.float8_e4m3fn)
        gaps = jnp.zeros((layout.batch, 2), jnp.int32)
        positions = Runs(gaps, gaps) if positions is None else positions
        return Eighths(Exact(buffer, buffer, jnp.zeros((layout.batch,), jnp.int32), positions))

    def encode(self, layout, bases, store, tokens):                  # [B, K, T, D]; storage rounds
        return tokens[0].k.swapaxes(1, 2), tokens[0].v.swapaxes(1, 2)

    def decode(self, layout, bases, store, k, v, positions, index):
        return k.astype(jnp.float32), v.astype(jnp.float32)

    def attend(self, layout, bases, store, q, positions, place, beside=None):   # beside: exact tokens of the same layer
        kept = store.tokens
        k, v = kept.k.astype(jnp.float32), kept.v.astype(jnp.float32)
        return coefficient_attention(q, CachedTokens(k, v, kept.length, kept.positions), **layout.spec.logits,
                                     q_positions=positions, causal=False, window=place.window, beside=beside)

    def logits(self, layout, bases, store, q, place):                # for votes of decoded queries
        return Logits(q, store.tokens.k.astype(jnp.float32))


if __name__ == "__main__":
    model = lkv.load_model("smollm2-135m")
    for spec in ("float8", "float8+snapkv:keep=0.5"):
        out = lkv.generate(model, spec, ["The KV cache is a list of keys and values. " * 6], max_new_tokens=16)
        print(spec, lkv.cache_bytes(out.cache).by_kind)
