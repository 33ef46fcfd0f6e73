"""Attention errors of a low-rank cache beside what its residuals predict (Online Subspace Projection, section 8)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.sink_logits import probabilities
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.estimators.linalg import eigenvalues
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.machine import Machine

BLOCK = 128  # tokens whose residual is one operator: the text's chunks, and as good for a single basis


class AttentionErrors(NamedTuple):
    """Of the last queries of a prompt that is read through its compressed cache; float32.

    Bounds hold for every gamma and for keys coded before RoPE: the residual K - gamma K^ is taken of the keys that
    queries meet.

    Attributes:
        logit: max over coded tokens of |l - l^|, `[B, T, N]`; logits are scaled by 1 / sqrt(d).
        weight: ||alpha - alpha^||_1 over all tokens.
        output: ||o - o^||_2.
        logit_bound: ||dK||_op ||q|| / sqrt(d).
        output_bound: 2 tanh(b / 2) max ||v|| + ||dV||_op with b the logit bound.
        measured_bound: the same with the measured max |l - l^| in the place of b.
        key_residual, value_residual: `[B, K]`, the largest operator norm of a block of `BLOCK` tokens.
        output_norm: ||o||_2, `[B, T, N]`.
    """

    logit: jax.Array
    weight: jax.Array
    output: jax.Array
    logit_bound: jax.Array
    output_bound: jax.Array
    measured_bound: jax.Array
    key_residual: jax.Array
    value_residual: jax.Array
    output_norm: jax.Array


def attention_errors(
    method: Any, layout: Layout, bases: Any, state: Any, taps: Taps, lengths: jax.Array, queries: int = 16
) -> AttentionErrors:
    """Errors of a layer's last `queries` queries of each prompt; pure and traceable, O(queries * S).

    Args:
        method: low-rank, coding one layer at a time.
        layout: of the cache.
        bases, state: of the layer, the state as `compress` returned it.
        taps: of the prompt, `[B, S, ...]`.
        lengths: int32 `[B]`.

    Raises:
        ValueError: a method that codes no tokens in a basis, or more queries than the prompt has tokens.
    """
    if not method.rebuilds:
        raise ValueError(f"{method.name}: codes no tokens in a basis whose errors could be tracked")
    if layout.spec.logit_cap is not None:
        raise ValueError(f"logit_cap={layout.spec.logit_cap}: the bounds are of logits that are not capped")
    size = taps.k.shape[1]
    if not 1 <= queries <= size:
        raise ValueError(f"queries={queries}: must lie in 1..{size}, the tokens of the prompt")
    k, v = (x.swapaxes(1, 2).astype(jnp.float32) for x in (taps.k, taps.v))
    seen_k, seen_v, coded = _as_attended(method, layout, bases, state, k, v)
    at = jnp.maximum(lengths - queries, 0)[:, None] + jnp.arange(queries)
    q = jnp.take_along_axis(taps.q.astype(jnp.float32), at[:, :, None, None], axis=1)
    visible = jnp.arange(size) <= at[:, :, None]
    rule = visible, layout.spec.scale, taps.sink_logits
    exact, close = (_attention(q, *kv, *rule) for kv in ((k, v), (seen_k, seen_v)))
    mask = (visible & coded[:, None])[:, :, None]
    logit = jnp.max(jnp.where(mask, jnp.abs(exact.logits - close.logits), 0.0), axis=-1)
    norms = [_operator_norm(x - y) for x, y in ((k, seen_k), (v, seen_v))]
    spread = layout.spec.group_size
    by_query = [jnp.repeat(x, spread, axis=1)[:, None] for x in norms]
    largest = jnp.repeat(jnp.max(jnp.linalg.norm(v, axis=-1), axis=-1), spread, axis=1)[:, None]
    logit_bound = by_query[0] * jnp.linalg.norm(q, axis=-1) * layout.spec.scale

    def bound(logits):
        return 2 * jnp.tanh(logits / 2) * largest + by_query[1]

    return AttentionErrors(
        logit, jnp.sum(jnp.abs(exact.weights - close.weights), axis=-1),
        jnp.linalg.norm(exact.out - close.out, axis=-1), logit_bound, bound(logit_bound), bound(logit), *norms,
        jnp.linalg.norm(exact.out, axis=-1),
    )


def _as_attended(method, layout, bases, state, k, v):
    """Keys after RoPE and values `[B, K, S, D]` as the cache gives them back, and which tokens are coded `[B, S]`."""
    seen_k, seen_v = method.rebuilt(layout, bases, state.store)
    slots = jnp.arange(seen_k.shape[2])
    positions = state.store.tokens.positions.at(slots)
    if method.rope == "pre" and layout.spec.rope is not None:
        cos, sin = rope_angles(layout.spec.rope, positions[:, None])
        seen_k = rotate(seen_k, cos, sin)
    # a token's slot lies so many behind its position as there are sinks
    tokens = jnp.arange(k.shape[2])
    coded = (tokens >= method.sinks) & (tokens - method.sinks < state.store.tokens.length[:, None])
    room = ((0, 0), (0, 0), (method.sinks, k.shape[2]), (0, 0))
    seen = (jnp.pad(x, room)[:, :, : k.shape[2]] for x in (seen_k, seen_v))
    mask = coded[:, None, :, None]
    return *(jnp.where(mask, new, old) for new, old in zip(seen, (k, v), strict=True)), coded


class _Attention(NamedTuple):
    logits: jax.Array
    weights: jax.Array
    out: jax.Array


def _attention(q, k, v, visible, scale, sink_logits) -> _Attention:
    """`[B, T, N, S]` and `[B, T, N, D]`."""
    spread = q.shape[2] // k.shape[1]
    k, v = (jnp.repeat(x, spread, axis=1) for x in (k, v))
    high = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("btnd,bnsd->btns", q, k, precision=high) * scale
    weights = probabilities(jnp.where(visible[:, :, None], logits, -jnp.inf), sink_logits, heads=(2,))
    return _Attention(logits, weights, jnp.einsum("btns,bnsd->btnd", weights, v, precision=high))


def _operator_norm(x: jax.Array) -> jax.Array:
    """Largest singular value of any block of tokens, `[B, K]`, of `[B, K, S, D]`."""
    blocks = -(-x.shape[2] // BLOCK)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, blocks * BLOCK - x.shape[2]), (0, 0)))
    x = x.reshape(*x.shape[:2], blocks, BLOCK, -1)
    gram = jnp.matmul(x.mT, x, precision=jax.lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.max(jnp.maximum(eigenvalues(gram)[..., -1], 0.0), axis=-1))


@dataclasses.dataclass(frozen=True)
class _Report:
    """A watch that calls `see` with the errors of every prompt."""

    codec: Any
    see: Callable[[AttentionErrors], None]
    queries: int

    def __call__(self, layout, bases, state, taps, lengths):
        queries = min(self.queries, layout.prompt)
        errors = attention_errors(self.codec, layout, bases, state, taps[0], lengths, queries)
        jax.debug.callback(self.see, errors, ordered=True)


def track_errors(method: Any, see: Callable[[AttentionErrors], None], queries: int = 16) -> Machine:
    """A method that does the same, and calls `see` with each layer's `AttentionErrors` as prompts are compressed.

    Layers are reported in order. It works inside of jit; a method that is not tracked compiles to what it was.

    Args:
        method: a low-rank codec of one layer at a time.
        see: called on the host with NumPy arrays.
        queries: how many of the last queries of each prompt are compared.

    Raises:
        TypeError: another kind of method.
    """
    if not method.rebuilds:
        raise TypeError(f"method={method!r}: only methods that code tokens in a basis have errors to track")
    return Machine(method, watch=_Report(method, see, queries))
