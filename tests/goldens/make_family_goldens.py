"""Write the golden logits of tiny checkpoints with transformers on torch (CPU), which loads them as it would published ones.

Run in an environment with the package, torch and transformers:

    PYTHONPATH=tests python tests/goldens/make_family_goldens.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from goldens.tiny_families import COLUMNS, FAMILIES, POSITIONS, mxfp4_codes, write_checkpoint
from goldens.tiny_models import random_tokens
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def logits_of(name: str, directory: Path) -> np.ndarray:
    """float32 `[2, positions, columns]`."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        write_checkpoint(directory / name, name), dtype=torch.float32, attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(random_tokens(FAMILIES[name]["vocab_size"])).long()).logits.numpy()
    return logits[:, POSITIONS, COLUMNS]


def dequantised() -> np.ndarray:
    """Random MXFP4 weights as transformers reads them, float32 `[E, in, out]`."""
    blocks, scales = (torch.from_numpy(x) for x in mxfp4_codes("mxfp4", (2, 64, 6)))
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        goldens = {name: logits_of(name, Path(scratch)) for name in FAMILIES} | {"mxfp4": dequantised()}
    np.savez_compressed(Path(__file__).parent / "families.npz", **goldens)
    print({name: (array.shape, np.abs(array).max()) for name, array in goldens.items()}, transformers.__version__)
