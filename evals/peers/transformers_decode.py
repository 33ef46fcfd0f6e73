"""transformers' own prefill and decode on torch, with the same weights, timed beside ours."""

import importlib.util
import time
from typing import Any

import numpy as np

from lowrank_kv_jax.files import expanded
from lowrank_kv_jax.models.load import DEMO_MODEL, demo_model_path


def require_torch() -> None:
    """Raise ValueError, with the remedy, unless torch and transformers can be imported."""
    needed = ("torch", "transformers", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the transformers peer needs {', '.join(missing)}: `uv sync --group parity`, or "
                         "`pip install torch accelerate` (the CPU build is enough)")


class TransformersContender:
    """A hand-written greedy loop over `AutoModelForCausalLM` with its default cache, not `generate`."""

    def __init__(self, model: Any, tokens: np.ndarray, steps: int):
        import torch

        self._torch, self._model, self._steps = torch, model, steps
        self._tokens = torch.tensor(np.asarray(tokens), dtype=torch.long)

    def round(self) -> tuple[float, float]:
        with self._torch.inference_mode():
            begin = time.perf_counter()
            out = self._model(self._tokens, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            int(token[0, 0])
            first = time.perf_counter()
            for _ in range(self._steps):
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            int(token[0, 0])
            return first - begin, time.perf_counter() - first


def load_torch_model(source: str, dtype: str) -> Any:
    """The same weights as `load_model(source)`, by transformers, on the CPU."""
    require_torch()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = demo_model_path() if source == DEMO_MODEL else expanded(source)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, **options).eval()
    return AutoModelForCausalLM.from_pretrained(str(path) if path.exists() else source, **options).eval()
