"""Answering a question from a compressed cache, greedily, layer by layer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.generation.forward import decode_step, refresh
from lowrank_kv_jax.generation.generate import ingest
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache, fork, take_rows
from lowrank_kv_jax.storage.sharding import to_host


def answer(
    method: Part, model: Any, cache: Cache, questions: Sequence[Sequence[int]], max_new_tokens: int, *,
    bases: Any = None, enough: Callable[[int, str], bool] | None = None,
    on_fewer_rows: Callable[[], None] | None = None, nonempty: Sequence[bool] = (),
    on_asked: Callable[[Cache, jax.Array], None] | None = None,
) -> list[str]:
    """Ingest one question a row and decode greedily.

    The steps are dispatched layer by layer: no program of the whole model has to be compiled for each method. Rows leave
    the batch once half of it is done, since a row that only waits costs as much as one that decodes.

    Args:
        cache: consumed; `fork` it first to keep it for other questions.
        questions: ids for each row.
        max_new_tokens: at most so many a row; end-of-sequence tokens end a row before.
        enough: called with a row and its answer so far; a row ends when it says so.
        on_fewer_rows: called before the first step of a smaller batch.
        on_asked: called, once the questions are in the cache, with a copy of it and the logits `[B, V]` behind them.
        nonempty: for each row, whether its first token can neither end it nor be a line break.

    Returns:
        The text of each row's answer.
    """
    config, params = model.config, model.params
    cache, logits = ingest(method, config, params, cache, questions, bases=bases)
    if on_asked is not None:
        on_asked(fork(cache), logits)
    if any(nonempty):
        line_break = model.tokenizer("\n", add_special_tokens=False).input_ids[-1]
        logits = logits.at[np.ix_(np.flatnonzero(nonempty), [*config.eos_ids, line_break])].set(-jnp.inf)
    ids: list[list[int]] = [[] for _ in questions]
    texts = [""] * len(questions)
    rows, done = np.arange(len(questions)), np.zeros(len(questions), bool)  # of the batch, which shrinks
    for step in range(max_new_tokens):
        token = to_host(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        for place in np.flatnonzero(~done):
            row = int(rows[place])
            if token[place] in config.eos_ids:
                done[place] = True
                continue
            ids[row].append(int(token[place]))
            texts[row] = model.tokenizer.decode(ids[row])
            done[place] = enough is not None and enough(row, texts[row])
        if done.all() or step + 1 == max_new_tokens:
            break
        if step and step % cache.layout.block == 0:
            cache = refresh(method, cache, bases=bases)
        size = _batch_size(done, cache)
        if size < len(done):
            kept = np.argsort(done, kind="stable")[:size]
            cache, rows, done, token = take_rows(cache, kept.tolist()), rows[kept], done[kept], token[kept]
            if on_fewer_rows is not None:
                on_fewer_rows()
        cache, logits = decode_step(
            method, config, params, cache, jnp.asarray(token), bases=bases, active=jnp.asarray(~done)
        )
    return texts


def _batch_size(done: np.ndarray, cache: Cache) -> int:
    """Rows to go on with: the batch halved as often as those that are not done fit; a mesh keeps its rows."""
    size, active = len(done), int((~done).sum())
    mesh = cache.layout.mesh
    if mesh is not None and mesh.shape.get("data", 1) > 1:
        return size
    while size > 1 and active <= (size + 1) // 2:
        size = (size + 1) // 2
    return size
