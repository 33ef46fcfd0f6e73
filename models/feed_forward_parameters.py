"""The weights of what stands behind attention, by their names in checkpoints: gated MLPs and experts."""

from typing import NamedTuple

from lowrank_kv_jax.models.beside import beside
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.param_info import ParamInfo, Size, fused, linear

_GGUF = "not read from GGUF"


class ExpertNames(NamedTuple):
    """Names in HF checkpoints: of the block of a layer, and of an expert's matrices."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES = {"mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2")}


def feed_forward_table(config: ModelConfig, layer: int) -> dict:
    """A layer's experts where it has them, else its gated MLP, with a `ParamInfo` in the place of each array."""
    hf = f"model.layers.{layer}."
    if config.moe is not None and layer in config.moe.layers:
        return _packed_experts(config, hf) if config.family == "gpt_oss" else _experts(config, hf)
    hidden, inner = (config.hidden_size, "embed"), (config.intermediate_size, "mlp")
    if config.family == "phi3":
        down = linear(inner, hidden, f"{hf}mlp.down_proj", _GGUF)
        maps = fused(hidden, {"gate": inner, "up": inner}, f"{hf}mlp.gate_up_proj", _GGUF)
        return {"gate_up": beside(maps["gate"], maps["up"]), "down": down}
    return gated(hidden, inner, f"{hf}mlp.", f"blk.{layer}.ffn_", config.mlp_bias)


def gated(hidden: Size, inner: Size, hf: str, gguf: str, bias: bool = False) -> dict:
    """A gated MLP; names without "gate_proj" and "gate"."""
    gate = linear(hidden, inner, f"{hf}gate_proj", f"{gguf}gate", bias)
    up = linear(hidden, inner, f"{hf}up_proj", f"{gguf}up", bias)
    return {"gate_up": beside(gate, up), "down": linear(inner, hidden, f"{hf}down_proj", f"{gguf}down", bias)}


def _experts(config: ModelConfig, layer: str) -> dict:
    assert config.moe is not None
    names, hidden, moe = _NAMES.get(config.family, ExpertNames()), config.hidden_size, config.moe
    block = f"{layer}{names.block}."

    def stack(ins: int, outs: int, name: str) -> ParamInfo:
        hf = f"{block}experts.{{}}.{name}.weight"
        return ParamInfo((moe.count, ins, outs), (None,) * 3, hf, _GGUF, transposed=True, stacked=True)

    table = {
        "router": linear((hidden, "embed"), (moe.count, None), f"{block}gate", _GGUF),
        "experts": {
            "gate": stack(hidden, moe.size, names.gate),
            "up": stack(hidden, moe.size, names.up),
            "down": stack(moe.size, hidden, names.down),
        },
    }
    if moe.shared:
        table["shared"] = gated((hidden, "embed"), (moe.size * moe.shared, None), f"{block}shared_experts.", _GGUF)
    return table


def _packed_experts(config: ModelConfig, layer: str) -> dict:
    """All experts in one tensor, as they are used; the columns of gate and up take turns, and everything has a bias."""
    assert config.moe is not None
    moe, hidden, block = config.moe, config.hidden_size, f"{layer}mlp."
    maps = {
        "gate": ("gate_up_proj", hidden, moe.size, (0, 2)), "up": ("gate_up_proj", hidden, moe.size, (1, 2)),
        "down": ("down_proj", moe.size, hidden, None),
    }
    experts = {}
    for name, (stored, ins, outs, turn) in maps.items():
        hf = f"{block}experts.{stored}"
        experts[name] = ParamInfo((moe.count, ins, outs), (None,) * 3, hf, _GGUF, turn=turn)
        experts[f"{name}_bias"] = ParamInfo((moe.count, outs), (None,) * 2, f"{hf}_bias", _GGUF, turn=turn)
    router = linear((hidden, "embed"), (moe.count, None), f"{block}router", _GGUF, bias=True)
    return {"router": router, "experts": experts}
