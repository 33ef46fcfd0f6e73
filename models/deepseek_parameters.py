"""The table of the weights of a DeepSeek-V2 layer, by their names in HF checkpoints."""

from lowrank_kv_jax.models.deepseek_config import DeepseekConfig
from lowrank_kv_jax.models.param_info import ParamInfo, linear, norm

_GGUF = "not read from GGUF"


def deepseek_layer(config: DeepseekConfig, layer: int) -> dict:
    """The parameter tree of one layer with a `ParamInfo` in the place of each array."""
    hf = f"model.layers.{layer}."
    hidden = (config.hidden_size, "embed")
    return {
        "attention_norm": norm(*hidden, f"{hf}input_layernorm", _GGUF),
        "attention": _attention(config, f"{hf}self_attn."),
        "mlp_norm": norm(*hidden, f"{hf}post_attention_layernorm", _GGUF),
        "mlp": _mlp(config, f"{hf}mlp.", config.intermediate_size)
        if layer < config.dense_layers
        else _experts(config, f"{hf}mlp."),
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


def _mlp(config: DeepseekConfig, hf: str, size: int) -> dict:
    hidden, inner = (config.hidden_size, "embed"), (size, None)
    return {
        "gate": linear(hidden, inner, f"{hf}gate_proj", _GGUF),
        "up": linear(hidden, inner, f"{hf}up_proj", _GGUF),
        "down": linear(inner, hidden, f"{hf}down_proj", _GGUF),
    }


def _experts(config: DeepseekConfig, hf: str) -> dict:
    hidden, inner, count = config.hidden_size, config.expert_size, config.experts

    def stack(ins: int, outs: int, name: str) -> ParamInfo:
        names = f"{hf}experts.{{}}.{name}.weight"
        return ParamInfo((count, ins, outs), (None,) * 3, names, _GGUF, transposed=True, stacked=True)

    return {
        "router": linear((hidden, "embed"), (count, None), f"{hf}gate", _GGUF),
        "experts": {
            "gate": stack(hidden, inner, "gate_proj"),
            "up": stack(hidden, inner, "up_proj"),
            "down": stack(inner, hidden, "down_proj"),
        },
        "shared": _mlp(config, f"{hf}shared_experts.", inner * config.shared_experts),
    }
