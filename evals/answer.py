"""Answering a question from a compressed cache, greedily, layer by layer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.cache import Cache
from lowrank_kv_jax.forward import decode_step, refresh
from lowrank_kv_jax.generate import ingest
from lowrank_kv_jax.method import KVMethod
from lowrank_kv_jax.sharding import to_host


def answer(
    method: KVMethod, model: Any, cache: Cache, questions: Sequence[Sequence[int]], max_new_tokens: int, *,
    bases: Any = None, enough: Callable[[int, str], bool] | None = None,
) -> list[str]:
    """Ingest one question a row and decode greedily.

    The steps are dispatched layer by layer: no program of the whole model has to be compiled for each method.

    Args:
        cache: consumed; `fork` it first to keep it for other questions.
        questions: ids for each row.
        max_new_tokens: at most so many a row; end-of-sequence tokens end a row before.
        enough: called with a row and its answer so far; a row ends when it says so.

    Returns:
        The text of each row's answer.
    """
    config, params = model.config, model.params
    cache, logits = ingest(method, config, params, cache, questions, bases=bases)
    rows = len(questions)
    ids: list[list[int]] = [[] for _ in range(rows)]
    texts, done = [""] * rows, np.zeros(rows, bool)
    for step in range(max_new_tokens):
        token = to_host(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        for row in np.flatnonzero(~done):
            if token[row] in config.eos_ids:
                done[row] = True
                continue
            ids[row].append(int(token[row]))
            texts[row] = model.tokenizer.decode(ids[row])
            done[row] = enough is not None and enough(row, texts[row])
        if done.all() or step + 1 == max_new_tokens:
            break
        if step and step % cache.layout.block == 0:
            cache = refresh(method, cache, bases=bases)
        cache, logits = decode_step(
            method, config, params, cache, jnp.asarray(token), bases=bases, active=jnp.asarray(~done)
        )
    return texts
