"""Tokens on their way into chunks, page by page: what begins a chunk, which basis it takes, and what is learned."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.osp_chunks import ChunkedStore, Chunks, overlap_of, put_page
from lowrank_kv_jax.codecs.osp_merge import make_room
from lowrank_kv_jax.codecs.osp_sides import Side
from lowrank_kv_jax.estimators import Estimator
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import project
from lowrank_kv_jax.storage.state import take_tokens


class Rules(NamedTuple):
    """When a chunk ends and what its basis is learned from; fields as those of the codec where they share a name.

    Attributes:
        learners: estimators of keys and of values.
        merges: whether chunks are merged when bases run out.
    """

    page: int
    chunk_length: int
    tau_k: float | None
    tau_v: float | None
    reuse: float | None
    window: int | None
    prior: float
    unseen: float
    lookahead: int
    subsample: int
    learners: tuple[Estimator, Estimator]
    merges: bool


def take_page(
    rules: Rules, stored: ChunkedStore, sides: tuple[Side, Side], done: jax.Array, counts: jax.Array, seen: jax.Array
) -> tuple[ChunkedStore, jax.Array]:
    """Code the rest of each row's open page, or its next one, with a new basis where a chunk begins.

    Args:
        done, counts, seen: int32 `[B]`: tokens of `sides` that are coded, that are to be, and that there are.

    Returns:
        What is stored then, and how many tokens are coded.
    """
    stored = begin_page(rules, stored, sides, done, counts, seen)
    room = rules.page - stored.tokens.length % rules.page
    take = jnp.clip(counts - done, 0, room)
    return code_page(rules, stored, sides, done, take), done + take


def begin_page(rules: Rules, stored: ChunkedStore, sides, done, counts, seen) -> ChunkedStore:
    """Where a page begins: decide whether a chunk does, and find its basis."""
    chunks, length = stored.chunks, stored.tokens.length
    begins, wanted = begins_chunk(rules, chunks, length, done, counts)
    last = current_bases(chunks)
    roomy = chunks.used < chunks.k_bases.capacity
    take = wanted if rules.merges else wanted & roomy

    def find():
        return tuple(side.joined(learner.basis(anchor(rules, i, chunks, sides, done, seen), side.columns))
                     for i, (side, learner) in enumerate(zip(sides, rules.learners, strict=True)))

    found = jax.lax.cond(jnp.any(take), find, lambda: last)
    if rules.reuse is not None:
        overlap = jnp.stack([overlap_of(u, new) for u, new in zip(last, found, strict=True)])
        take = take & ((length == 0) | jnp.any(overlap < rules.reuse, axis=(0, 2)))
    if rules.merges:
        stored = make_room(stored, sides, rules.page, take & ~roomy)
        chunks = stored.chunks
        take = take & (chunks.used < chunks.k_bases.capacity)
    k_bases, v_bases = (
        bases.put(jnp.minimum(chunks.used, bases.capacity - 1), new, take)
        for bases, new in zip((chunks.k_bases, chunks.v_bases), found, strict=True)
    )
    used = chunks.used + take
    chunks = dataclasses.replace(
        chunks, k_bases=k_bases, v_bases=v_bases, used=used, begun=jnp.where(wanted, length, chunks.begun),
        owner=put_page(chunks.owner, length // rules.page, jnp.maximum(used - 1, 0), begins),
        missed=jnp.where(begins[:, None, None], 0.0, chunks.missed),
    )
    return dataclasses.replace(stored, chunks=chunks)


def begins_chunk(rules: Rules, chunks: Chunks, length, done, counts) -> tuple[jax.Array, jax.Array]:
    """In which rows a page begins, and in which of these a chunk, bool `[B]`."""
    begins = (length % rules.page == 0) & (done < counts)
    mean = chunks.missed / rules.page
    fired = jnp.zeros_like(begins)
    for side, threshold in enumerate((rules.tau_k, rules.tau_v)):
        if threshold is not None:
            fired = fired | jnp.any(mean[:, side] > threshold, axis=1)
    return begins, begins & ((length == 0) | (length - chunks.begun >= rules.chunk_length) | fired)


def anchor(rules: Rules, index: int, chunks: Chunks, sides: tuple[Side, Side], done, seen) -> Any:
    """What the basis of a chunk that begins now is taken from: what was learned, the tokens ahead, and calibration.

    Args:
        index: 0 for keys, 1 for values.
    """
    side, learner = sides[index], rules.learners[index]
    learned = (chunks.k_learned, chunks.v_learned)[index]
    ahead = min(rules.lookahead, side.x.shape[2])
    unseen = jnp.full_like(done, rules.chunk_length)
    if ahead:
        unseen = jnp.maximum(rules.chunk_length - jnp.clip(seen - done, 0, ahead), 0)
        weight = (done[:, None] + jnp.arange(ahead)[None] < seen[:, None]).astype(jnp.float32)
        x, weight = thinned(rules, take_tokens(side.x, done, ahead), weight[:, None])
        learned = learner.update(learned, *side.seen(x, weight))
    if rules.prior or rules.unseen:
        prior = jnp.broadcast_to(side.prior, (side.x.shape[0], *side.prior.shape))
        weight = (rules.prior + rules.unseen * unseen.astype(jnp.float32)) / rules.subsample
        weight = jnp.broadcast_to(weight[:, None, None], prior.shape[:-1])
        learned = learner.update(learned, *side.turned(prior, weight))
    return learned


def thinned(rules: Rules, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every so-many-th of the tokens `[B, J, T, W]` and of their weights `[B, 1, T]`."""
    return x[:, :, :: rules.subsample], weight[..., :: rules.subsample]


def code_page(rules: Rules, stored: ChunkedStore, sides, done, take) -> ChunkedStore:
    """Code the next `take` tokens of each row, at most to the end of its page, and learn them."""
    chunks = stored.chunks
    width = min(rules.page, sides[0].x.shape[2])
    slots = jnp.arange(width)[None]
    valid = (slots < take[:, None])[:, None].astype(jnp.float32)
    codes, missed, learned = [], [], []
    for u, side, known, learner in zip(
        current_bases(chunks), sides, (chunks.k_learned, chunks.v_learned), rules.learners, strict=True
    ):
        x = take_tokens(side.x, done, width).astype(jnp.float32) * valid[..., None]
        c = project(u, x.swapaxes(1, 2))
        codes.append(c)
        total, kept = side.energies(x, c)
        left = jnp.maximum(total - kept, 0.0)
        missed.append(jnp.sum(jnp.sqrt(left / jnp.where(total > 0, total, 1.0)), axis=-1))
        weight = valid
        if rules.window is not None:
            known = learner.forget(known, jnp.exp(-take / rules.window)[:, None])
            weight = valid * jnp.exp(-(take[:, None] - 1 - slots) / rules.window)[:, None]
        learned.append(learner.update(known, *side.seen(*thinned(rules, x, weight))))
    chunks = dataclasses.replace(
        chunks, k_learned=learned[0], v_learned=learned[1], missed=chunks.missed + jnp.stack(missed, axis=1)
    )
    return dataclasses.replace(stored, tokens=coded_tokens.append(stored.tokens, *codes, take), chunks=chunks)


def current_bases(chunks: Chunks) -> tuple[jax.Array, jax.Array]:
    """The newest bases as they are stored, `[B, J, W, R]`."""
    index = jnp.maximum(chunks.used - 1, 0)[:, None]
    return chunks.k_bases.take(index)[:, 0], chunks.v_bases.take(index)[:, 0]
