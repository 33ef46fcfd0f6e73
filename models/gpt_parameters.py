"""The weights of GPT-2 and GPT-NeoX by their names in HF checkpoints."""

from lowrank_kv_jax.models.gpt_config import GPTConfig
from lowrank_kv_jax.models.param_info import ParamInfo, linear, norm

_GGUF = "not read from GGUF"


def gpt_table(config: GPTConfig) -> dict:
    """The parameter tree of `config` with a `ParamInfo` in the place of each array."""
    hidden, vocab = config.hidden_size, config.vocab_size
    prefix = "" if config.learned_positions else "gpt_neox."
    words = "wte.weight" if config.learned_positions else "gpt_neox.embed_in.weight"
    last = "ln_f" if config.learned_positions else "final_layer_norm"
    head = "lm_head.weight" if config.learned_positions else "embed_out.weight"
    layer = _gpt2_layer if config.learned_positions else _neox_layer
    table = {
        "embed": {"embedding": ParamInfo((vocab, hidden), ("vocab", "embed"), words, _GGUF)},
        "layers": tuple(layer(config, i) for i in range(config.num_layers)),
        "norm": _layer_norm(hidden, prefix + last),
    }
    if config.learned_positions:
        table["positions"] = {"embedding": ParamInfo((config.context, hidden), (None, "embed"), "wpe.weight", _GGUF)}
    if not config.tie_embeddings:
        table["head"] = {"kernel": ParamInfo((hidden, vocab), ("embed", "vocab"), head, _GGUF, transposed=True)}
    return table


def _layer_norm(size: int, hf: str) -> dict:
    return norm(size, "embed", hf, _GGUF) | {"bias": ParamInfo((size,), ("embed",), f"{hf}.bias", _GGUF)}


def _gpt2_layer(config: GPTConfig, layer: int) -> dict:
    """GPT-2 stores matrices `[in, out]`; q, k and v lie one behind the other, which no cut over heads divides."""
    hf, hidden, inner = f"h.{layer}.", config.hidden_size, config.intermediate_size

    def conv(ins, outs, name):
        kernel = ParamInfo((ins[0], outs[0]), (ins[1], outs[1]), f"{hf}{name}.weight", _GGUF)
        return {"kernel": kernel, "bias": ParamInfo((outs[0],), (outs[1],), f"{hf}{name}.bias", _GGUF)}

    stream = (hidden, "embed")
    return {
        "attention_norm": _layer_norm(hidden, f"{hf}ln_1"),
        "qkv": conv(stream, (3 * hidden, None), "attn.c_attn"),
        "o_proj": conv((hidden, "q_heads"), stream, "attn.c_proj"),
        "mlp_norm": _layer_norm(hidden, f"{hf}ln_2"),
        "up": conv(stream, (inner, "mlp"), "mlp.c_fc"),
        "down": conv((inner, "mlp"), stream, "mlp.c_proj"),
    }


def _neox_layer(config: GPTConfig, layer: int) -> dict:
    hf, hidden = f"gpt_neox.layers.{layer}.", config.hidden_size
    stream, inner = (hidden, "embed"), (config.intermediate_size, "mlp")
    return {
        "attention_norm": _layer_norm(hidden, f"{hf}input_layernorm"),
        "qkv": linear(stream, (3 * hidden, "q_heads"), f"{hf}attention.query_key_value", _GGUF, bias=True),
        "o_proj": linear((hidden, "q_heads"), stream, f"{hf}attention.dense", _GGUF, bias=True),
        "mlp_norm": _layer_norm(hidden, f"{hf}post_attention_layernorm"),
        "up": linear(stream, inner, f"{hf}mlp.dense_h_to_4h", _GGUF, bias=True),
        "down": linear(inner, stream, f"{hf}mlp.dense_4h_to_h", _GGUF, bias=True),
    }
