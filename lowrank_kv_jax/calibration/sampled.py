"""Text that a model writes itself, to calibrate on.

Second moments of one corpus know the directions that this corpus takes; what a model writes from nothing, drawn at
temperature 1, spans what it was trained on, in no need of data (LLM-QAT, Liu et al., 2023, calibrates quantisation so).
"""

import types
from typing import Any

import numpy as np

from lowrank_kv_jax.generation.generate import generate
from lowrank_kv_jax.progress import ProgressBar

LENGTH = 1024
"""Tokens of a text: a step of the decoder for each of these."""

ROWS = 16
"""Texts that are written at once, whose full caches are held together; as many as calibration asks for by default."""


def sampled_windows(model: Any, tokens: int, seed: int = 0, progress: bool = False) -> np.ndarray:
    """Texts that the model writes, each begun by one of its `openings` in turn.

    Args:
        model: a `LoadedModel`.
        tokens: wanted in all; rounded up to whole texts.
        progress: show a progress bar.

    Returns:
        int32 `[n, R]`, R at most `LENGTH` and the model's context.
    """
    length = min(LENGTH, model.config.context)
    count = -(-tokens // length)
    begins = openings(model)
    prompts = [[begins[i % len(begins)]] for i in range(count)]
    mute = types.SimpleNamespace(config=model.config, params=model.params, tokenizer=None)  # ids are wanted, not texts
    texts = []
    with ProgressBar("sampling text", -(-count // ROWS) * (length - 1), progress) as bar:
        for first in range(0, count, ROWS):
            some = prompts[first : first + ROWS]
            drawn = generate(
                mute, "full", some, max_new_tokens=length - 1, temperature=1.0, stop_at_eos=False, capacity=length,
                seeds=range(seed + first, seed + first + len(some)), on_tokens=lambda new: bar.advance(new.shape[1]),
            )
            texts += [[*prompt, *row] for prompt, row in zip(some, drawn.tokens, strict=True)]
    return np.asarray(texts, np.int32)


def openings(model: Any) -> list[int]:
    """Tokens that a text may begin with: what opens a sequence or ends one, and what opens a chat."""
    config, tokenizer = model.config, model.tokenizer
    found = [*(() if config.bos_id is None else (config.bos_id,)), *config.eos_ids]
    if getattr(tokenizer, "chat_template", None):
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        found += tokenizer(chat, add_special_tokens=False).input_ids[:1]
    return list(dict.fromkeys(found)) or [0]
