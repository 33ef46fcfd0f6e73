"""The table of a model's weights: the shape, logical axes and checkpoint names of each array.

Initialisation, sharding and conversion all derive from this one table.
"""

from collections.abc import Callable

import jax

from lowrank_kv_jax.models.beside import Leaf
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.deepseek_config import DeepseekConfig
from lowrank_kv_jax.models.deepseek_parameters import deepseek_layer
from lowrank_kv_jax.models.feed_forward_parameters import feed_forward_table
from lowrank_kv_jax.models.gpt_config import GPTConfig
from lowrank_kv_jax.models.gpt_parameters import gpt_table
from lowrank_kv_jax.models.param_info import ParamInfo, fused, linear, norm

__all__ = ["Leaf", "ParamInfo", "param_table", "params_of", "stored_arrays"]


def param_table(config: ModelConfig) -> dict:
    """The parameter tree of `config` with a `ParamInfo` in the place of each array, or a `Beside` of several."""
    if isinstance(config, GPTConfig):
        return gpt_table(config)
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


def stored_arrays(config: ModelConfig) -> list[ParamInfo]:
    """The arrays that checkpoints know, in the order of the parameter tree; the decoder may hold several as one."""
    return [piece for leaf in jax.tree.leaves(param_table(config)) for piece in leaf.pieces]


def params_of(config: ModelConfig, make: Callable[[ParamInfo], jax.Array]) -> dict:
    """The parameter tree of what `make` gives for each of `stored_arrays`, in their order."""
    return jax.tree.map(lambda leaf: leaf.joined([make(piece) for piece in leaf.pieces]), param_table(config))


def _layer_table(config: ModelConfig, layer: int) -> dict:
    if isinstance(config, DeepseekConfig):
        return deepseek_layer(config, layer)
    hf, gguf = f"model.layers.{layer}.", f"blk.{layer}."
    hidden = (config.hidden_size, "embed")
    queries = (config.q_heads * config.head_dim, "q_heads")
    keys = (config.kv_heads * config.head_dim, "kv_heads")
    if config.family == "phi3":
        attention = fused(
            hidden, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, f"{hf}self_attn.qkv_proj", "not read from GGUF"
        )
    else:
        attention = {
            "q_proj": linear(hidden, queries, f"{hf}self_attn.q_proj", f"{gguf}attn_q", config.qkv_bias),
            "k_proj": linear(hidden, keys, f"{hf}self_attn.k_proj", f"{gguf}attn_k", config.qkv_bias),
            "v_proj": linear(hidden, keys, f"{hf}self_attn.v_proj", f"{gguf}attn_v", config.qkv_bias),
        }
    attention["o_proj"] = linear(queries, hidden, f"{hf}self_attn.o_proj", f"{gguf}attn_output", config.o_bias)
    sinks = ParamInfo((config.q_heads,), ("q_heads",), f"{hf}self_attn.sinks", "not read from GGUF")
    if config.qk_norm:
        attention["q_norm"] = norm(config.head_dim, None, f"{hf}self_attn.q_norm", f"{gguf}attn_q_norm")
        attention["k_norm"] = norm(config.head_dim, None, f"{hf}self_attn.k_norm", f"{gguf}attn_k_norm")
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    table = {
        "attention_norm": norm(*hidden, f"{hf}input_layernorm", f"{gguf}attn_norm"),
        "attention": attention | ({"sinks": sinks} if config.sink_logits else {}),
        "mlp_norm": norm(*hidden, f"{hf}{before_mlp}", f"{gguf}ffn_norm"),
        "mlp": feed_forward_table(config, layer),
    }
    if config.post_norms:
        table["attention_post_norm"] = norm(*hidden, f"{hf}post_attention_layernorm", f"{gguf}post_attention_norm")
        table["mlp_post_norm"] = norm(*hidden, f"{hf}post_feedforward_layernorm", f"{gguf}post_ffw_norm")
    return table
