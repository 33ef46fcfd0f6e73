"""Model configuration: one frozen dataclass for all Llama-like families, read from HF `config.json`."""

import dataclasses

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.models.experts_config import ExpertsConfig


def _later(default):
    """A field that a model's fingerprint names only where it is set; see `convert`."""
    return dataclasses.field(default=default, metadata={"later": True})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static description of a decoder, hashable by value. Nothing else decides what the decoder computes.

    Attributes:
        family: `model_type` of HF's config; decides under which names checkpoints keep the weights, and nothing else.
        vocab_size: rows of the embedding.
        hidden_size: H, the width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: L.
        q_heads: N, a multiple of `kv_heads`.
        kv_heads: K.
        head_dim: D; N * D need not be H.
        norm_eps: epsilon of every RMS norm.
        rope: the rotary embedding, `None` where there is none.
        context: the longest sequence that the model was made for, in tokens.
        windows: sliding window of each layer in tokens, `None` where a layer sees everything.
        qkv_bias, o_bias, mlp_bias: whether these projections carry a bias.
        qk_norm: RMS norm of each q and k head before RoPE (Qwen3).
        tie_embeddings: the output head is the transposed embedding.
        bos_id: token that opens a sequence, `None` where the family has none.
        eos_ids: tokens that end a generation; may be empty.
        rope_magnitude: factor on queries and keys after RoPE (LongRoPE, YaRN), on the channels that rotate.
        softmax_scale: factor on the logits where it is not 1 / sqrt(head_dim).
        ropes: the rotary embedding of each layer where they differ, `None` where a layer has none; `rope` is one of them.
        mlp_activation: of the gate of gated MLPs, "silu" or "gelu_tanh".
        norm_offset: added to the weights of all RMS norms (Gemma: 1).
        post_norms: what attention and MLP give is normed before it is added to the residual stream (Gemma).
        embed_scale: factor on the embedding.
        logit_cap: logits of attention become cap * tanh(logits / cap), None where they stay as they are.
        sink_logits: query heads have a learnt logit that joins the softmax and carries no value.
        output_cap: logits of tokens become cap * tanh(logits / cap), None where they stay as they are.
        moe: the mixture of experts in the place of the MLP of some layers.

    Raises:
        ValueError: sizes that are no positive integers or do not fit, windows that are not one for each layer.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec | None
    context: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    rope_magnitude: float = _later(1.0)
    softmax_scale: float | None = _later(None)
    ropes: tuple[RopeSpec | None, ...] | None = _later(None)
    mlp_activation: str = _later("silu")
    norm_offset: float = _later(0.0)
    post_norms: bool = _later(False)
    embed_scale: float = _later(1.0)
    logit_cap: float | None = _later(None)
    output_cap: float | None = _later(None)
    moe: ExpertsConfig | None = _later(None)
    sink_logits: bool = _later(False)

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "q_heads",
            "kv_heads",
            "head_dim",
            "context",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
            if value >= 2**31:
                raise ValueError(f"{field} must be at most {2**31 - 1}, got {short(value)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads must be a multiple of kv_heads, got {self.q_heads} and {self.kv_heads}"
            )
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows must have one entry for each of the {self.num_layers} layers, "
                f"got {len(self.windows)}"
            )
        if self.rope is not None and self.rope.interleaved:
            raise ValueError("rope.interleaved=True: these decoders pair channels i and i + rotary_dim / 2; permute the "
                             "weights of q and k")
        if self.mlp_activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"mlp_activation {self.mlp_activation!r}: must be 'silu' or 'gelu_tanh'")
        if self.output_cap is not None and not self.output_cap > 0:
            raise ValueError(f"output_cap {self.output_cap}: must be above 0")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ValueError(f"a sliding window must be None or a positive integer, got {window!r}")

    @property
    def attention(self) -> AttentionSpec:
        """What a cache method may know of this model."""
        return AttentionSpec(
            num_layers=self.num_layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            context=self.context,
            windows=self.windows,
            softmax_scale=self.softmax_scale,
            ropes=self.ropes,
            logit_cap=self.logit_cap,
            sink_logits=self.sink_logits,
        )

    @property
    def by_layer(self) -> "tuple[ModelConfig, ...]":
        """Of each layer the config with its rotary embedding for all, so that layers of one kind share programs."""
        if self.ropes is None:
            return (self,) * self.num_layers
        return tuple(dataclasses.replace(self, rope=rope, ropes=None) for rope in self.ropes)
