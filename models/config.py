"""Model configuration: one frozen dataclass for all Llama-like families, read from HF `config.json`."""

import dataclasses

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.checks.shown import short


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static description of a decoder, hashable by value. Nothing else decides what the decoder computes.

    Attributes:
        family: "llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "gpt2" or "gpt_neox"; kept for messages only.
        vocab_size: rows of the embedding.
        hidden_size: H, the width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: L.
        q_heads: N, a multiple of `kv_heads`.
        kv_heads: K.
        head_dim: D; N * D need not be H.
        norm_eps: epsilon of every RMS norm.
        rope: the rotary embedding, `None` where positions are learned.
        context: the longest sequence that the model was made for, in tokens.
        windows: sliding window of each layer in tokens, `None` where a layer sees everything.
        qkv_bias, o_bias, mlp_bias: whether these projections carry a bias.
        qk_norm: RMS norm of each q and k head before RoPE (Qwen3).
        tie_embeddings: the output head is the transposed embedding.
        bos_id: token that opens a sequence, `None` where the family has none.
        eos_ids: tokens that end a generation; may be empty.
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
        )
