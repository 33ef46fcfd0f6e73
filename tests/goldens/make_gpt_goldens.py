"""Write the golden logits of tiny GPT-2 and GPT-NeoX models with transformers on torch (CPU).

Run in an environment with torch and transformers:

    python tests/goldens/make_gpt_goldens.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from tiny_models import GPT_CONFIGS, random_tensor, random_tokens


def logits_of(name: str) -> dict[str, np.ndarray]:
    config = transformers.AutoConfig.for_model(**GPT_CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    weights = {
        key: torch.from_numpy(random_tensor(key.removeprefix("transformer."), tuple(value.shape)))
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    missing = model.load_state_dict(weights, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    tokens = random_tokens(config.vocab_size)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    return {f"{name}/tokens": tokens, f"{name}/logits": logits.astype(np.float32)}


if __name__ == "__main__":
    goldens = {key: value for name in GPT_CONFIGS for key, value in logits_of(name).items()}
    np.savez_compressed(Path(__file__).parent / "gpt.npz", **goldens)
    print({key: value.shape for key, value in goldens.items()}, transformers.__version__)
