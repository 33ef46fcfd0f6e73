"""What the sketches of Online Subspace Projection foretell of each chunk, beside the errors that it makes."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.osp_coding import anchor, begins_chunk, take_page
from lowrank_kv_jax.estimators.linalg import eigenvalues
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.codec import Tokens
from lowrank_kv_jax.storage.positions import Runs


class ChunkErrors(NamedTuple):
    """Of the chunks of a prompt; C slots, those that hold no chunk are not `used`. Float32.

    Attributes:
        used: bool `[B, C]`.
        key_sketch, value_sketch: sqrt(s_{r+1}^2 + eps) of the sketch that the chunk's basis was taken from, of tokens
            before the chunk and of those ahead that it had seen, as they are weighted there, `[B, K, C]`.
        key_residual, value_residual: ||A (I - P)||_op of the chunk's own tokens, `[B, K, C]`.
        logit: max over the chunk's tokens of |l - l^|, mean over queries, `[B, K, C]`.
        output: ||o - o_c||, o_c the output where this chunk alone is coded, mean over queries.
        logit_bound, output_bound: what the residuals allow, means over queries; logits of capped models have none.
    """

    used: jax.Array
    key_sketch: jax.Array
    value_sketch: jax.Array
    key_residual: jax.Array
    value_residual: jax.Array
    logit: jax.Array
    output: jax.Array
    logit_bound: jax.Array
    output_bound: jax.Array


class CodedPrompt(NamedTuple):
    """A prompt of one layer, and what its cache gives back of it; S tokens behind the sinks, whole pages.

    Attributes:
        k, v: keys after RoPE and values, float32 `[B, K, S, D]`.
        seen_k, seen_v: the same from the cache.
        owner: int32 `[B, P]`, the chunk of each page of S / P tokens.
        coded: bool `[B, S]`, slots that hold a coded token.
        sketches: `[B, 2, K, C]`, of each chunk; see `ChunkErrors`.
    """

    k: jax.Array
    v: jax.Array
    seen_k: jax.Array
    seen_v: jax.Array
    owner: jax.Array
    coded: jax.Array
    sketches: jax.Array


def sketching(method: Any) -> Any:
    """The method with Frequent Directions of its own size, and slots for all chunks that it may begin.

    Raises:
        ValueError: a method that codes no tokens in chunks, or ranks of each head.
    """
    if getattr(method, "chunk_length", None) is None:
        raise ValueError(f"{method.name}: codes no tokens in chunks")
    if method.head_ranks != "max" or method.heads != "per_head":
        raise ValueError(f"head_ranks={method.head_ranks!r}, heads={method.heads!r}: chunks are looked at head by head, "
                         "with head_ranks='max' and heads='per_head'")
    return dataclasses.replace(method, estimator="frequent_directions", when_full="keep", chunks=None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def code_prompt(method: Any, layout: Layout, bases: Any, taps: Taps) -> CodedPrompt:
    """Code a prompt `[B, S, ...]` as `compress` does, page by page, and ask each sketch as a basis is taken from it.

    Args:
        method: what `sketching` returned.
    """
    batch, size = taps.k.shape[:2]
    sinks, page = method.sinks, method.page
    own = slice(sinks, None)
    slots = jnp.broadcast_to(jnp.arange(sinks, size), (batch, size - sinks))
    tokens = Tokens(taps.k[:, own], taps.k_pre[:, own], taps.v[:, own], slots)
    counts, seen = (jnp.full((batch,), max(size - n, 0)) for n in (sinks + method.recent, sinks))
    store = method.empty(layout, bases, size)
    where = Runs(jnp.stack([0 * counts, counts], axis=1), jnp.stack([0 * counts + sinks, 0 * counts], axis=1))
    store = dataclasses.replace(store, tokens=dataclasses.replace(store.tokens, positions=where))
    sides, rules = method.coding_sides(layout, bases, tokens), method.rules(layout, bases)

    def step(carry, _):
        store, done = carry
        _, began = begins_chunk(rules, store.chunks, store.tokens.length, done, counts)
        learned = [anchor(rules, i, store.chunks, sides, done, seen) for i in (0, 1)]
        left = jnp.stack([left_by(own, side.columns) for own, side in zip(learned, sides, strict=True)], axis=1)
        store, done = take_page(rules, store, sides, done, counts, seen)
        return (store, done), (began, left)

    pages = -(-max(size - sinks - method.recent, 0) // page)
    (store, _), (began, left) = jax.lax.scan(step, (store, jnp.zeros_like(counts)), None, length=pages)
    number = jnp.cumsum(began, axis=0) - 1
    hot = (began[..., None] & (number[..., None] == jnp.arange(store.chunks.k_bases.capacity))).astype(jnp.float32)
    seen_k, seen_v = (x[:, :, : pages * page] for x in method.rebuilt(layout, bases, store))
    if method.rope == "pre" and layout.spec.rope is not None:
        at = sinks + jnp.arange(pages * page)
        seen_k = rotate(seen_k, *rope_angles(layout.spec.rope, at[None, None]))
    room = ((0, 0), (0, 0), (0, pages * page), (0, 0))
    k, v = (jnp.pad(x[:, own].swapaxes(1, 2).astype(jnp.float32), room)[:, :, : pages * page] for x in (taps.k, taps.v))
    coded = jnp.arange(pages * page) < store.tokens.length[:, None]
    mask = coded[:, None, :, None]
    return CodedPrompt(
        k, v, jnp.where(mask, seen_k, k), jnp.where(mask, seen_v, v), store.chunks.owner[:, :pages], coded,
        jnp.einsum("pbc,pbsk->bskc", hot, left),
    )


def left_by(learned: Any, rank: int) -> jax.Array:
    """sqrt(s_{r+1}^2 + eps) `[B, K]`: no direction beyond a sketch's leading `rank` holds more of what it was fed."""
    rows = jnp.sum(learned.rows**2, axis=-1)  # squared singular values, descending
    following = rows[..., rank] if rows.shape[-1] > rank else jnp.zeros_like(learned.shrunk)
    return jnp.sqrt(following + learned.shrunk)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def errors_by_chunk(layout: Layout, found: CodedPrompt, taps: Taps, sinks: int, queries: int) -> ChunkErrors:
    """Errors that each chunk makes of the last `queries` queries of a prompt `[B, S, ...]`.

    Args:
        sinks: tokens in front of the coded ones.
    """
    spec, size = layout.spec, taps.k.shape[1]
    page = found.k.shape[2] // found.owner.shape[1]
    chunks = found.sketches.shape[-1]
    hot = (found.owner[..., None] == jnp.arange(chunks)).astype(jnp.float32)  # b p c
    residuals = [_operator_norms(x - y, hot, page) for x, y in ((found.k, found.seen_k), (found.v, found.seen_v))]
    at = jnp.arange(size - queries, size)
    q = taps.q[:, -queries:].astype(jnp.float32).reshape(len(taps.q), queries, spec.kv_heads, -1, spec.head_dim)
    seen = (sinks + jnp.arange(found.k.shape[2]) <= at[:, None]) & found.coded[:, None]  # b t s
    high = jax.lax.Precision.HIGHEST

    def logits(k, mask):
        product = jnp.einsum("btkgd,bksd->btkgs", q, k, precision=high)
        return jnp.where(mask[:, :, None, None], product * spec.scale, -jnp.inf)

    every = jnp.swapaxes(taps.k, 1, 2).astype(jnp.float32), jnp.swapaxes(taps.v, 1, 2).astype(jnp.float32)
    causal = jnp.broadcast_to(jnp.arange(size) <= at[:, None], (len(q), queries, size))
    whole, exact, close = logits(every[0], causal), logits(found.k, seen), logits(found.seen_k, seen)
    top = jnp.maximum(whole.max(-1), close.max(-1))[..., None]
    share = jnp.exp(whole - top)
    total, out = share.sum(-1), jnp.einsum("btkgs,bksd->btkgd", share, every[1], precision=high)
    before, after = (jnp.exp(x - top) for x in (exact, close))

    def by_chunk(x):  # sums over the tokens of each chunk, b t k g s -> b t k g c
        return jnp.einsum("btkgps,bpc->btkgc", x.reshape(*x.shape[:-1], -1, page), hot, precision=high)

    def mixed(weights, v):
        weights = weights.reshape(*weights.shape[:-1], -1, page)
        v = v.reshape(*v.shape[:2], -1, page, v.shape[-1])
        of_pages = jnp.einsum("btkgps,bkpsd->btkgpd", weights, v, precision=high)
        return jnp.einsum("btkgpd,bpc->btkgcd", of_pages, hot, precision=high)

    changed = out[..., None, :] + mixed(after, found.seen_v) - mixed(before, found.v)
    changed = changed / (total[..., None] + by_chunk(after - before))[..., None]
    wrong = jnp.where(seen[:, :, None, None], jnp.abs(exact - close), 0.0)
    wrong = wrong.reshape(*wrong.shape[:-1], -1, page).max(-1)
    logit = jnp.max(wrong[..., None] * hot[:, None, None, None], axis=-2)
    norms = jnp.linalg.norm(q, axis=-1)[..., None]
    bound = residuals[0][:, None, :, None] * norms * spec.scale
    largest = jnp.max(jnp.linalg.norm(every[1], axis=-1), axis=-1)[:, None, :, None, None]
    output_bound = 2 * jnp.tanh(bound / 2) * largest + residuals[1][:, None, :, None]

    def mean(x):
        return jnp.mean(x, axis=(1, 3))

    output = jnp.linalg.norm(changed - (out / total[..., None])[..., None, :], axis=-1)
    return ChunkErrors(
        jnp.any(hot * found.coded[:, ::page, None] > 0, axis=1), found.sketches[:, 0], found.sketches[:, 1], *residuals,
        mean(logit), mean(output), mean(bound), mean(output_bound),
    )


def _operator_norms(x: jax.Array, hot: jax.Array, page: int) -> jax.Array:
    """Largest singular values `[B, K, C]` of the tokens `[B, K, S, D]` of each chunk."""
    pages = x.reshape(*x.shape[:2], -1, page, x.shape[-1])
    gram = jnp.einsum("bkpsd,bkpse,bpc->bkcde", pages, pages, hot, precision=jax.lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.maximum(eigenvalues(gram)[..., -1], 0.0))
