"""The table of a model's weights: the shape, logical axes and checkpoint names of each array.

Initialisation, sharding and conversion all derive from this one table.
"""

import dataclasses

from lowrank_kv_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One array of the parameter tree (a leaf: not itself a pytree).

    Attributes:
        shape: as the decoder uses it; matrices are `[in, out]`, the embedding `[vocab, embed]`.
        axes: logical axis of each dimension ("vocab", "embed", "q_heads", "kv_heads", "mlp", or `None`). The
            dimension named "q_heads" holds q_heads * head_dim channels, head by head; so "kv_heads".
        hf: tensor name in HF checkpoints.
        gguf: tensor name in GGUF files.
        transposed: checkpoints store it `[out, in]`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf: str
    gguf: str
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape


def param_table(config: ModelConfig) -> dict:
    """The parameter tree of `config` with a `ParamInfo` in the place of each array."""
    hidden, vocab = config.hidden_size, config.vocab_size
    table = {
        "embed": {
            "embedding": ParamInfo(
                (vocab, hidden), ("vocab", "embed"), "model.embed_tokens.weight", "token_embd.weight"
            )
        },
        "layers": tuple(_layer_table(config, layer) for layer in range(config.num_layers)),
        "norm": {"scale": ParamInfo((hidden,), ("embed",), "model.norm.weight", "output_norm.weight")},
    }
    if not config.tie_embeddings:
        table["head"] = {
            "kernel": ParamInfo(
                (hidden, vocab), ("embed", "vocab"), "lm_head.weight", "output.weight", transposed=True
            )
        }
    return table


def _layer_table(config: ModelConfig, layer: int) -> dict:
    hf, gguf = f"model.layers.{layer}.", f"blk.{layer}."

    def linear(ins: tuple[int, str], outs: tuple[int, str], hf_name: str, gguf_name: str, bias: bool) -> dict:
        entry = {
            "kernel": ParamInfo(
                (ins[0], outs[0]),
                (ins[1], outs[1]),
                f"{hf}{hf_name}.weight",
                f"{gguf}{gguf_name}.weight",
                transposed=True,
            )
        }
        if bias:
            entry["bias"] = ParamInfo(
                (outs[0],), (outs[1],), f"{hf}{hf_name}.bias", f"{gguf}{gguf_name}.bias"
            )
        return entry

    def norm(size: int, axis: str | None, hf_name: str, gguf_name: str) -> dict:
        return {"scale": ParamInfo((size,), (axis,), f"{hf}{hf_name}.weight", f"{gguf}{gguf_name}.weight")}

    hidden = (config.hidden_size, "embed")
    queries = (config.q_heads * config.head_dim, "q_heads")
    keys = (config.kv_heads * config.head_dim, "kv_heads")
    mlp = (config.intermediate_size, "mlp")
    attention = {
        "q_proj": linear(hidden, queries, "self_attn.q_proj", "attn_q", config.qkv_bias),
        "k_proj": linear(hidden, keys, "self_attn.k_proj", "attn_k", config.qkv_bias),
        "v_proj": linear(hidden, keys, "self_attn.v_proj", "attn_v", config.qkv_bias),
        "o_proj": linear(queries, hidden, "self_attn.o_proj", "attn_output", config.o_bias),
    }
    if config.qk_norm:
        attention["q_norm"] = norm(config.head_dim, None, "self_attn.q_norm", "attn_q_norm")
        attention["k_norm"] = norm(config.head_dim, None, "self_attn.k_norm", "attn_k_norm")
    return {
        "attention_norm": norm(*hidden, "input_layernorm", "attn_norm"),
        "attention": attention,
        "mlp_norm": norm(*hidden, "post_attention_layernorm", "ffn_norm"),
        "mlp": {
            "gate": linear(hidden, mlp, "mlp.gate_proj", "ffn_gate", config.mlp_bias),
            "up": linear(hidden, mlp, "mlp.up_proj", "ffn_up", config.mlp_bias),
            "down": linear(mlp, hidden, "mlp.down_proj", "ffn_down", config.mlp_bias),
        },
    }
