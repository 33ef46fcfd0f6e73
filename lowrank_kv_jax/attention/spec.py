"""What a cache method may know of a model: shapes, RoPE and windows, nothing of its weights."""

import dataclasses
import math
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.checks.shown import short


class LogitRule(TypedDict):
    """How products of queries and keys become logits, as arguments of whatever attends; see `blockwise.logits_of`."""

    scale: float
    cap: float | None


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Latent attention (MLA; DeepSeek-V2, section 2.1) in absorbed form, as one kv head that all queries share.

    A key is [decoupled rotary key | normed latent], so that RoPE turns its leading channels. Its values are the keys
    themselves: value taps have no channels, partials are in key space, and the model reads the latent's part of them.

    Attributes:
        rank: channels of the latent, the last ones of a key.
        eps: of the norm latent / sqrt(mean(latent^2) + eps); its weight is absorbed by the projections.
    """

    rank: int
    eps: float

    def normalise(self, latent: jax.Array) -> jax.Array:
        """The normed latent over the last axis, computed in float32, in the dtype of `latent`."""
        wide = latent.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(latent.dtype)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static shape of a model's attention, hashable by value; handed to every method.

    Attributes:
        num_layers: L.
        q_heads: N, a multiple of `kv_heads`.
        kv_heads: K.
        head_dim: D.
        rope: the rotary embedding, `None` for models that have none.
        context: the longest sequence that the model was made for, in tokens.
        windows: sliding window of each layer in tokens (a query sees the last `window` keys, itself
            included), `None` where a layer sees everything.
        latent: where the cache holds latents (then K = 1), else `None`.
        softmax_scale: factor on the logits where it is not 1 / sqrt(head_dim).
        ropes: the rotary embedding of each layer where they differ, `None` where a layer has none; `rope` is one of them.
        logit_cap: logits s become cap * tanh(s / cap) before the softmax (Gemma 2); None leaves them as they are.
        sink_logits: each query head has a learnt logit that joins the softmax and carries no value (gpt-oss). It is a
            weight of the layer, and comes with its taps.

    Raises:
        ValueError: sizes or a cap that are not positive, query heads that are no multiple of the kv heads, windows or
            rotary embeddings that are not one for each layer, RoPE over more channels than a head has.
    """

    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    context: int
    windows: tuple[int | None, ...]
    latent: LatentSpec | None = None
    softmax_scale: float | None = None
    ropes: tuple[RopeSpec | None, ...] | None = None
    logit_cap: float | None = None
    sink_logits: bool = False

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("num_layers", "q_heads", "kv_heads", "head_dim", "context")}
        sizes |= {f"windows[{i}]": window for i, window in enumerate(self.windows) if window is not None}
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={short(value)}: must be a positive integer")
            if value >= 2**31:
                raise ValueError(f"{name}={short(value)}: must be at most {2**31 - 1}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads={self.q_heads}: must be a multiple of kv_heads={self.kv_heads}")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"windows={self.windows}: must hold one entry for each of {self.num_layers} layers")
        if self.logit_cap is not None and not 0 < self.logit_cap < math.inf:
            raise ValueError(f"logit_cap={self.logit_cap}: must be a finite number above 0, or None")
        if self.ropes is not None and (len(self.ropes) != self.num_layers or self.rope not in self.ropes):
            raise ValueError(f"ropes: must hold one entry for each of {self.num_layers} layers, rope among them")
        for rope in filter(None, self.each_rope):
            if rope.rotary_dim > self.head_dim:
                raise ValueError(f"rope.rotary_dim={rope.rotary_dim}: must be at most head_dim={self.head_dim}")
        if self.rope is not None and self.rope.interleaved and self.latent is not None:
            raise ValueError("rope.interleaved=True: not of latent attention, whose rotary keys lie half-split in front")

    @property
    def each_rope(self) -> tuple[RopeSpec | None, ...]:
        """The rotary embedding of each layer, `None` where it has none."""
        return (self.rope,) * self.num_layers if self.ropes is None else self.ropes

    def of_layer(self, layer: int) -> "AttentionSpec":
        """The same with the rotary embedding of one layer for all: layers of one embedding are of one kind."""
        return self if self.ropes is None else dataclasses.replace(self, rope=self.ropes[layer], ropes=None)

    @property
    def cached_channels(self) -> int:
        """Numbers that the full cache holds for a token and layer: keys and values, or keys alone for latents."""
        return self.kv_heads * self.head_dim * (1 if self.latent else 2)

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Softmax scale 1 / sqrt(head_dim), or the model's own; it stays so at any rank (OjaKV, A.3)."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def logits(self) -> LogitRule:
        """How products become logits."""
        return {"scale": self.scale, "cap": self.logit_cap}


class Taps(NamedTuple):
    """What one attention layer exposes of `T` tokens to a cache method.

    Of latent attention (`AttentionSpec.latent`) `v` has no channels, `k_pre` holds the latent before its norm, and `q`
    of a prefilled prompt has no channels either: it is attended in head space, without absorbed queries.

    Attributes:
        q: queries after RoPE, `[B, T, N, D]`.
        k: keys after RoPE, `[B, T, K, D]`.
        k_pre: what enters RoPE (after Qwen3's k-norm), `[B, T, K, D]`.
        v: values, `[B, T, K, D]`.
        x: the normalised hidden state that the projections read, `[B, T, H]`; no cache reads it.
        reread: of a prompt that a method has read twice (`KVMethod.rereads`), how much the second reading attends to
            each token, float32 `[B, K, T]` in 0..1; else None.
        sink_logits: of the layer's query heads, float32 `[N]`, where they have them (`AttentionSpec.sink_logits`).
    """

    q: jax.Array
    k: jax.Array
    k_pre: jax.Array
    v: jax.Array
    x: jax.Array | None = None
    reread: jax.Array | None = None
    sink_logits: jax.Array | None = None

    def part(self, cut: slice) -> "Taps":
        """Of some of the tokens."""
        reread = None if self.reread is None else self.reread[:, :, cut]
        x = None if self.x is None else self.x[:, cut]
        q, k, k_pre, v = (y[:, cut] for y in (self.q, self.k, self.k_pre, self.v))
        return Taps(q, k, k_pre, v, x, reread, self.sink_logits)

    def rows(self, count: int) -> "Taps":
        """Of the first rows."""
        cut = {name: x[:count] for name, x in self._asdict().items() if x is not None and name != "sink_logits"}
        return self._replace(**cut)
