"""Write the golden logits of the tiny DeepSeek-V2 models with transformers on torch (CPU).

    python tests/goldens/make_deepseek_goldens.py
"""

import math
from pathlib import Path

import numpy as np
import torch
import transformers
from tiny_models import DEEPSEEK, random_tensor, random_tokens


def weights(model: torch.nn.Module, config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """Drawn by the names of the published checkpoints; transformers stacks the experts of a layer."""
    drawn = {}
    for name, value in model.state_dict().items():
        if ".mlp.experts." not in name:
            drawn[name] = random_tensor(name if name.endswith("weight") else f"{name}.weight", tuple(value.shape))
            continue
        stem, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        rows = value.shape[1] // len(parts)
        drawn[name] = np.stack(
            [
                np.concatenate([random_tensor(f"{stem}.{e}.{p}.weight", (rows, value.shape[2])) for p in parts])
                for e in range(config.n_routed_experts)
            ]
        )
    return {name: torch.from_numpy(array) for name, array in drawn.items()}


def logits(name: str) -> dict[str, np.ndarray]:
    config = transformers.AutoConfig.for_model(**DEEPSEEK[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(weights(model, config), strict=True)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        layer.mlp.num_experts = config.n_routed_experts  # transformers 5.2 reads it and does not set it
    scaling = config.rope_parameters
    if scaling.get("mscale_all_dim"):
        # the published code and transformers' DeepSeek-V3 do this; its DeepSeek-V2 (5.2) leaves it out
        for layer in model.model.layers:
            layer.self_attn.scaling *= (1 + 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"])) ** 2
    tokens = random_tokens(config.vocab_size)
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long()).logits.numpy()
    return {f"{name}/tokens": tokens, f"{name}/logits": out}


if __name__ == "__main__":
    arrays = {}
    for family in DEEPSEEK:
        arrays |= logits(family)
    np.savez_compressed(Path(__file__).parent / "deepseek.npz", **arrays)
