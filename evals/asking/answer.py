"""Answering a question from a compressed cache, greedily, layer by layer."""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.results.records import warn
from lowrank_kv_jax.generation.forward import decode_step, extend, refresh
from lowrank_kv_jax.generation.generate import ingest
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache, fork, take_rows
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.storage.backend import platform
from lowrank_kv_jax.storage.sharding import to_host

READS, LEAST_GAIN = 4, 1.5
"""A row whose last reads brought fewer tokens in the mean is decoded in steps."""
Enough = Callable[[int, Sequence[int]], bool]
"""Called with a row and the ids of its answer so far, once for each token; the row ends when it says so."""


def answer(
    method: Part, model: Any, cache: Cache, questions: Sequence[Sequence[int]], max_new_tokens: int, *,
    bases: Any = None, enough: Enough | None = None, on_fewer_rows: Callable[[], None] | None = None,
    nonempty: Sequence[bool] = (), on_asked: Callable[[Cache, jax.Array], None] | None = None,
    drafts: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Ingest one question a row and decode greedily.

    The steps are dispatched layer by layer: no program of the whole model has to be compiled for each method. On a CPU
    rows leave the batch once half of it is done, since a row that only waits costs as much as one that decodes; elsewhere
    it costs next to nothing, and compiling for each size of a batch most of all.

    Args:
        cache: consumed; `fork` it first to keep it for other questions.
        questions: ids for each row.
        max_new_tokens: at most so many a row; end-of-sequence tokens end a row before.
        enough: see `Enough`.
        on_fewer_rows: called before the first step of a smaller batch.
        on_asked: called, once the questions are in the cache, with a copy of it and the logits `[B, V]` behind them.
        nonempty: for each row, whether its first token can neither end it nor be a line break.
        drafts: what each row may answer. A row reads its draft a block at a time, as a speculative decoder does, and
            goes on with guesses, or step by step, from the block in which it leaves it. Methods that a block changes
            (see `_reads_as_it_steps`) have no use for it.

    Returns:
        The ids of each row's answer.
    """
    config, params = model.config, model.params
    cache, logits = ingest(method, config, params, cache, questions, bases=bases)
    if jnp.isnan(logits).any():  # an answer is made of it all the same, and scored: a fault must not pass for a low score
        warn(f"{method.name}: logits behind a question are NaN; its answers say nothing")
    if on_asked is not None:
        on_asked(fork(cache), logits)
    if any(nonempty):
        line_break = model.tokenizer("\n", add_special_tokens=False).input_ids[-1]
        logits = logits.at[np.ix_(np.flatnonzero(nonempty), [*config.eos_ids, line_break])].set(-jnp.inf)
    if drafts is None or not _reads_as_it_steps(method):
        drawn = [_Row(model, number, enough) for number in range(len(questions))]
        return _decode(method, model, cache, logits, drawn, 0, max_new_tokens, bases, on_fewer_rows)
    if on_fewer_rows is not None:
        on_fewer_rows()
    found = []
    for number, (question, draft) in enumerate(zip(questions, drafts, strict=True)):
        row, own = _Row(model, number, enough), take_rows(cache, [number])
        read = follow(method, model, own, logits[number : number + 1], row, question, list(draft), max_new_tokens, bases)
        found += _decode(method, model, *read, max_new_tokens, bases, None)
    return found


def _reads_as_it_steps(method: Part) -> bool:
    """Whether a block of tokens is read as so many steps are: not where its queries choose pages together, or a token is
    evicted at every step."""
    machine = machine_of(method)
    evicts = machine.selection is not None and machine.selection.schedule == "paper"
    return machine.standing_reading is None and not evicts


class _Row:
    """What a row has answered.

    Attributes:
        ids: of its tokens.
        done: whether it ends there.
    """

    def __init__(self, model: Any, number: int, enough: Enough | None):
        self.model, self.number, self.enough = model, number, enough
        self.ids: list[int] = []
        self.done = False

    def take(self, token: int) -> None:
        """One more token, which may end the row."""
        if token in self.model.config.eos_ids:
            self.done = True
            return
        self.ids.append(token)
        self.done = self.enough is not None and self.enough(self.number, self.ids)


def follow(
    method: Part, model: Any, cache: Cache, logits: jax.Array, row: _Row, question: Sequence[int], draft: Sequence[int],
    most: int, bases: Any,
) -> tuple[Cache, jax.Array, list[_Row], int]:
    """Read a draft as long as the row, alone in its cache, would have answered it, then what it may go on with.

    A read brings the tokens that were guessed right (see `guessed`) and one more, and costs more than a step: where
    guesses were of no use, the row is left to steps.

    Returns:
        The cache and logits `[1, V]` where the last block begins, the row, and how many of its tokens the cache holds.
    """
    block, at, gains = cache.layout.block, 0, collections.deque([math.inf], READS)
    while not row.done and sum(gains) >= LEAST_GAIN * len(gains):
        known, had, size = row.ids[at:], len(row.ids), min(block, most - at)
        ahead_of_it = draft[had:] if row.ids == draft[:had] else []  # nothing, once the row has left the draft
        piece = [*known, *ahead_of_it][:size]
        piece += guessed([*question, *draft, *row.ids[:at], *piece], size - len(piece))
        ahead, likeliest, last = _read(method, model, cache, logits, piece, bases)
        for token, taken in zip(likeliest[len(known) :], [*piece[len(known) :], None], strict=True):
            if taken is None and len(piece) == block:  # of the next block
                cache, logits, at = refresh(method, ahead, bases=bases), last, at + block
                break
            row.take(token)
            row.done |= len(row.ids) == most
            if row.done or token != taken:
                break
        gains.append(math.inf if ahead_of_it else len(row.ids) - had)
    return cache, logits, [row], at


def _read(
    method: Part, model: Any, cache: Cache, logits: jax.Array, piece: Sequence[int], bases: Any
) -> tuple[Cache, list[int], jax.Array]:
    """Read a piece of at most a block behind a cache, which is left as it is.

    Returns:
        A copy that holds the piece, the likeliest tokens in the place of each of its tokens and behind it, and the logits
        `[1, V]` behind a whole block.
    """
    if not piece:
        return cache, [int(jnp.argmax(logits))], logits
    padded = np.zeros((1, cache.layout.block), np.int32)
    padded[0, : len(piece)] = piece
    ahead, found = extend(method, model.config, model.params, fork(cache), jnp.asarray(padded),
                          jnp.asarray([len(piece)], jnp.int32), bases=bases, all_logits=True)
    likeliest = to_host(jnp.argmax(jnp.concatenate([logits[:, None], found], axis=1)[0], axis=-1))
    return ahead, likeliest.tolist()[: len(piece) + 1], found[:, -1]


def guessed(seen: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that may follow: those that followed when the last few tokens stood there before.

    The longest match of up to three tokens counts, and of several the latest: prompt lookup decoding
    (https://github.com/apoorvumang/prompt-lookup-decoding). Small models repeat themselves.
    """
    text, size = list(seen), len(seen)
    while len(text) < size + count:
        found = (at + n for n in (3, 2, 1) for at in range(len(text) - n - 1, -1, -1) if text[at : at + n] == text[-n:])
        place = next(found, None)
        if place is None:
            break
        text.append(text[place])
    return text[size:]


def _decode(
    method: Part, model: Any, cache: Cache, logits: jax.Array, rows: list[_Row], at: int, most: int, bases: Any,
    on_fewer_rows: Callable[[], None] | None,
) -> list[list[int]]:
    """Decode step by step until every row is done or has `most` tokens.

    Args:
        rows: one for each of the cache's.
        at: tokens of every row that the cache holds, whole blocks; those behind them are decoded again.
    """
    places = np.arange(len(rows))  # of the batch, which shrinks
    for step in range(at, most):
        drawn = [rows[place].ids[step] if step < len(rows[place].ids) else None for place in places]
        token = np.array(to_host(jnp.argmax(logits, axis=-1).astype(jnp.int32)))
        for i, place in enumerate(places):
            if drawn[i] is not None:
                token[i] = drawn[i]
            elif not rows[place].done:
                rows[place].take(int(token[i]))
        done = np.array([rows[place].done for place in places])
        if done.all() or step + 1 == most:
            break
        if step > at and step % cache.layout.block == 0:
            cache = refresh(method, cache, bases=bases)
        size = _batch_size(done, cache)
        if size < len(done):
            kept = np.argsort(done, kind="stable")[:size]
            cache, places, done, token = take_rows(cache, kept.tolist()), places[kept], done[kept], token[kept]
            if on_fewer_rows is not None:
                on_fewer_rows()
        cache, logits = decode_step(
            method, model.config, model.params, cache, jnp.asarray(token), bases=bases, active=jnp.asarray(~done)
        )
    return [row.ids for row in rows]


def _batch_size(done: np.ndarray, cache: Cache) -> int:
    """Rows to go on with: the batch halved as often as those that are not done fit; a mesh keeps its rows, and so does
    an accelerator."""
    size, active = len(done), int((~done).sum())
    mesh = cache.layout.mesh
    if platform() != "cpu" or mesh is not None and mesh.shape.get("data", 1) > 1:
        return size
    while size > 1 and active <= (size + 1) // 2:
        size = (size + 1) // 2
    return size
