"""A second reading of the prompt: what reconstructing it attends to (Kim et al., 2025, "KVzip").

A model that is to repeat its context looks at what it needs of it for any question. The prompt is fed once more behind
itself, as if the model repeated it; how much attention a token gets from the copies is its score. A copy sees all of the
prompt and the copies before it in its chunk, whose positions begin behind the prompt: reading costs as many chunks of the
same place as the prompt has, and a long prompt does not outgrow the model's context by more than a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int, Int32

from lowrank_kv_jax.attention.blockwise import logits_of
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention

CHUNK = 2048  # tokens that are repeated in one go, as in the paper (section 3.3)
SINKS = 4  # first tokens that stand for the rest of the prompt where a chunk's attention is normalised
QUERIES = 64  # of a block: the probabilities of one block are all that lives at a time


class Past(NamedTuple):
    """What copies see of a prompt whose earlier chunks are compressed already.

    Attributes:
        part: attention of the copies over it, `[B, S, N, D]`.
        sinks: log-sum-exp over its first `SINKS` tokens alone, float32 `[B, S, N]`.
        start: int32 `[B]`, how many tokens it has.
    """

    part: AttnPartial
    sinks: Float32[jax.Array, "B S N"]
    start: Int[jax.Array, " B"]


def reread_positions(lengths: Int[jax.Array, " B"], size: int) -> Int32[jax.Array, "B S"]:
    """Positions int32 `[B, S]` of the copies of a prompt's S tokens."""
    return lengths[:, None] + jnp.arange(size, dtype=jnp.int32) % CHUNK


def prompt_twice(
    tokens: Int[jax.Array, "B S"], lengths: Int[jax.Array, " B"], start: Int[jax.Array, " B"] | None = None
) -> tuple[Int[jax.Array, "B 2*S"], Int32[jax.Array, "B 2*S"]]:
    """A prompt, or a chunk of one, with its copy behind it.

    Args:
        tokens: `[B, S]`, rows padded on the right.
        lengths: int32 `[B]`.
        start: int32 `[B]`, how many tokens stand before a chunk; None: none.

    Returns:
        Tokens `[B, 2 S]` and their positions, int32 `[B, 2 S]`, the largest below `start` + S + min(S, `CHUNK`).
    """
    first = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    first, lengths = (first, lengths) if start is None else (first + start[:, None], start + lengths)
    positions = jnp.concatenate([first, reread_positions(lengths, tokens.shape[1])], axis=1)
    return jnp.concatenate([tokens, tokens], axis=1), positions


def attend_twice(
    q: Float[jax.Array, "B T N D"], k: Float[jax.Array, "B T K D"], v: Float[jax.Array, "B T K D"],
    lengths: Int[jax.Array, " B"], *, scale: float, cap: float | None = None, window: int | None = None,
    sink_logits: Float[jax.Array, " N"] | None = None,
) -> tuple[Float[jax.Array, "B T N D"], Float32[jax.Array, "B K T//2"]]:
    """Exact attention of a prompt and of its copy, and what the copy attends to.

    Args:
        q, k, v: `[B, 2 S, heads, D]` after RoPE at the positions of `prompt_twice`.
        lengths, scale, cap, window, sink_logits: as for `reread_attention`.

    Returns:
        `[B, 2 S, N, D]` in the dtype of `q`, and what `Taps.reread` holds of the prompt's S tokens, float32 `[B, K, S]`.
    """
    size, rule = q.shape[1] // 2, {"scale": scale, "cap": cap, "window": window}
    first = causal_attention(*(y[:, :size] for y in (q, k, v)), sink_logits, **rule)
    second, votes = reread_attention(q[:, size:], k, v, lengths, sink_logits=sink_logits, **rule)
    return jnp.concatenate([first, second], axis=1), votes


def reread_attention(
    q: Float[jax.Array, "B S N D"], k: Float[jax.Array, "B 2*S K D"], v: Float[jax.Array, "B 2*S K D"],
    lengths: Int[jax.Array, " B"], *, scale: float, window: int | None, cap: float | None = None,
    sink_logits: Float[jax.Array, " N"] | None = None, past: Past | None = None,
) -> tuple[Float[jax.Array, "B S N D"], Float32[jax.Array, "B K S"]]:
    """Attention of the copies, and what they attend to.

    Args:
        q: `[B, S, N, D]` of the copies, after RoPE at `reread_positions`.
        k, v: `[B, 2 S, K, D]` of the prompt and, behind it, of the copies.
        lengths: int32 `[B]`, tokens of the prompt; the others are padding, in the copies too.
        scale, cap: as for `attention.blockwise.logits_of`.
        window: sliding window in tokens, or None.
        sink_logits: of the query heads, float32 `[N]`; they take their share of attention and votes.
        past: of a prompt that comes in chunks: what lies before this one; q, k, v and lengths are of the chunk, behind
            which the copies stand.

    Returns:
        `[B, S, N, D]` in the dtype of `q`, and float32 votes `[B, K, S]`: the largest share of attention that a copy in
        the token's chunk gives it, over the copies and the query heads of a kv head, where sinks, chunk and copies share
        the attention (algorithm 1); 0 for padding.
    """
    batch, size, heads, dim = q.shape
    kv_heads, chunk = k.shape[2], min(CHUNK, size)
    blocks = -(-size // QUERIES)
    q = jnp.pad(q, ((0, 0), (0, blocks * QUERIES - size), (0, 0), (0, 0)))
    q = q.reshape(batch, blocks, QUERIES, kv_heads, heads // kv_heads, dim)
    start = jnp.zeros_like(lengths) if past is None else past.start
    prompt, position = jnp.arange(size), reread_positions(start + lengths, blocks * QUERIES)
    sinks_beside = None if sink_logits is None else sink_logits.reshape(kv_heads, 1, -1, 1)
    if past is not None:
        out_before, lse_before, lse_sinks = (_in_blocks(x, blocks, kv_heads) for x in (*past.part, past.sinks))

    def block(votes, i):
        index = i * QUERIES + jnp.arange(QUERIES)
        # copies of one chunk: a block has one, CHUNK being a multiple of QUERIES
        begin = jnp.minimum(index[0] // CHUNK * CHUNK, size - chunk)
        copies = begin + jnp.arange(chunk)
        keys, values = (
            jnp.concatenate([x[:, :size], jax.lax.dynamic_slice_in_dim(x, size + begin, chunk, axis=1)], axis=1)
            for x in (k, v)
        )
        at = jax.lax.dynamic_slice_in_dim(position, i * QUERIES, QUERIES, axis=1)
        seen = _seen(index, copies, at, start, lengths, size, window)[:, None, :, None]
        logits = jnp.einsum("btkgd,bskd->bktgs", q[:, i], keys, preferred_element_type=jnp.float32)
        logits = logits_of(logits, scale, cap)
        logits = jnp.where(seen, logits, -jnp.inf)
        others, near_others = sinks_beside, sinks_beside
        if past is not None:
            others, near_others = (_together(sinks_beside, x[:, i, ..., None]) for x in (lse_before, lse_sinks))
        weights, rest = _shares(logits, others)
        out = jnp.einsum("bktgs,bskd->btkgd", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
        if past is not None:
            assert others is not None
            lse = lse_before[:, i, ..., None]
            mine = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - others) * rest)
            out = out + jnp.swapaxes(mine * out_before[:, i], 1, 2)
        fresh = _votes(logits, index, lengths, size, near_others, with_sinks=past is None)
        return jnp.maximum(votes, fresh), out.astype(q.dtype)

    votes, out = jax.lax.scan(block, jnp.zeros((batch, kv_heads, size), jnp.float32), jnp.arange(blocks))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, blocks * QUERIES, heads, dim)[:, :size]
    return out, jnp.where((prompt < lengths[:, None])[:, None], votes, 0.0)


def _seen(
    index: jax.Array, copies: jax.Array, at: jax.Array, start: jax.Array, lengths: jax.Array, size: int,
    window: int | None,
) -> jax.Array:
    """Which of the prompt's `size` tokens and, behind them, of some copies `[c]` the copies `index` `[T]`, which stand
    `at` `[B, T]`, see: bool `[B, T, size + c]`."""
    batch, prompt = len(lengths), jnp.arange(size)
    of_prompt = jnp.broadcast_to((prompt < lengths[:, None])[:, None], (batch, len(index), size))
    of_copies = (copies <= index[:, None]) & (copies // CHUNK == index[:, None] // CHUNK)
    of_copies = jnp.broadcast_to(of_copies, (batch, *of_copies.shape))
    if window is not None:
        of_prompt &= (start[:, None] + prompt)[:, None] > at[:, :, None] - window
        of_copies &= ((start + lengths)[:, None] + copies % CHUNK)[:, None] > at[:, :, None] - window
    return jnp.concatenate([of_prompt, of_copies], axis=2)


def _votes(
    logits: jax.Array, index: jax.Array, lengths: jax.Array, size: int, others: jax.Array | None, *, with_sinks: bool
) -> jax.Array:
    """The largest share `[B, K, size]` that one of the copies `index` `[T]`, all of one chunk, gives each of its tokens.

    Args:
        logits: `[B, K, T, G, size + c]` of the prompt and of c copies.
        others: log-sum-exp of what else shares the attention.
        with_sinks: whether the prompt's first tokens share it, too.
    """
    prompt, of_chunk = jnp.arange(size), index[0] // CHUNK
    own = prompt // CHUNK == of_chunk
    near = own | (prompt < SINKS) if with_sinks else own
    near = jnp.append(near, jnp.ones(logits.shape[-1] - size, bool))
    shared, _ = _shares(jnp.where(near, logits, -jnp.inf), others)
    voter = (index < lengths[:, None])[:, None, :, None, None]
    return jnp.max(jnp.where(voter & own, shared[..., :size], 0.0), axis=(2, 3))


def _in_blocks(x: jax.Array, blocks: int, kv_heads: int) -> jax.Array:
    """Of queries `[B, S, N, ...]`: `[B, blocks, K, QUERIES, G, ...]`."""
    x = jnp.pad(x, ((0, 0), (0, blocks * QUERIES - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(len(x), blocks, QUERIES, kv_heads, -1, *x.shape[3:]).swapaxes(2, 3)


def _together(first: jax.Array | None, second: jax.Array) -> jax.Array:
    return second if first is None else jnp.logaddexp(first, second)


def _shares(logits: jax.Array, others: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Softmax of `logits` `[B, K, T, G, S]` beside what weighs exp(others) `[B, K, T, G, 1]`, and the share of that."""
    if others is None:
        return jax.nn.softmax(logits, axis=-1), jnp.zeros(())
    top = jnp.maximum(logits.max(-1, keepdims=True), others)
    weights, rest = jnp.exp(logits - top), jnp.exp(others - top)
    total = weights.sum(-1, keepdims=True) + rest
    return weights / total, rest / total
