"""The table of the weights of a DeepSeek-V2 layer, by their names in HF checkpoints."""

from lowrank_kv_jax.models.deepseek_config import DeepseekConfig
from lowrank_kv_jax.models.feed_forward_parameters import feed_forward_table
from lowrank_kv_jax.models.param_info import linear, norm

_GGUF = "not read from GGUF"


def deepseek_layer(config: DeepseekConfig, layer: int) -> dict:
    """The parameter tree of one layer with a `ParamInfo` in the place of each array."""
    hf = f"model.layers.{layer}."
    hidden = (config.hidden_size, "embed")
    return {
        "attention_norm": norm(*hidden, f"{hf}input_layernorm", _GGUF),
        "attention": _attention(config, f"{hf}self_attn."),
        "mlp_norm": norm(*hidden, f"{hf}post_attention_layernorm", _GGUF),
        "mlp": feed_forward_table(config, layer),
    }


def _attention(config: DeepseekConfig, hf: str) -> dict:
    hidden, latent = (config.hidden_size, "embed"), config.kv_lora_rank
    queries = (config.q_heads * (config.nope_head_dim + config.rope_head_dim), "q_heads")
    heads = (config.q_heads * (config.nope_head_dim + config.v_head_dim), "q_heads")
    table = {
        "kv_down": linear(hidden, (latent + config.rope_head_dim, None), f"{hf}kv_a_proj_with_mqa", _GGUF),
        "kv_norm": norm(latent, None, f"{hf}kv_a_layernorm", _GGUF),
        "kv_up": linear((latent, None), heads, f"{hf}kv_b_proj", _GGUF),
        "o_proj": linear((config.q_heads * config.v_head_dim, "q_heads"), hidden, f"{hf}o_proj", _GGUF),
    }
    if config.q_lora_rank is None:
        return table | {"q_proj": linear(hidden, queries, f"{hf}q_proj", _GGUF)}
    down = (config.q_lora_rank, None)
    return table | {
        "q_down": linear(hidden, down, f"{hf}q_a_proj", _GGUF),
        "q_norm": norm(*down, f"{hf}q_a_layernorm", _GGUF),
        "q_up": linear(down, queries, f"{hf}q_b_proj", _GGUF),
    }
