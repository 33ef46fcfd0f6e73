"""Perplexity of a text that is scored in blocks through a compressed cache."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.evals.asking.clock import PrefillClock
from lowrank_kv_jax.evals.asking.prefill_many import prefill_many
from lowrank_kv_jax.evals.perplexity.divergence import Predictions
from lowrank_kv_jax.evals.results.sizes import Size, size_of
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.storage.sharding import to_host


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Of scored tokens, in nats.

    Attributes:
        nll: negative log-likelihoods, float64 `[B, T]`.
        divergence: of predictions from the full cache's, float32 `[B, T]`; None where those are not known.
    """

    nll: np.ndarray
    divergence: np.ndarray | None = None

    @property
    def ppl(self) -> float:
        """exp of the mean over all scored tokens."""
        return float(np.exp(np.mean(self.nll)))


@jax.jit
def token_scores(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log p of `tokens` `[B, T]` under `logits` `[B, T, V]`, and whether no token is more likely."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    nll = -jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
    return nll, jnp.argmax(logits, axis=-1) == tokens


def score_rows(
    method: Part, model: Any, cache: Cache, logits: jax.Array, rows: Sequence[Sequence[int]], *, bases: Any = None,
    see: Callable[[int, jax.Array], Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Score a continuation of each row of a cache, all of its tokens; rows may differ in length.

    Each block of `layout.block` tokens is appended, attends through the cache, and is folded into it by
    `refresh`.

    Args:
        cache: consumed; `fork` it first to keep it.
        logits: `[B, V]` at the last token that the cache holds: they predict the first one scored.
        rows: ids of each row, at least one.
        see: called with each piece's logits `[B, T, V]` and how many of the tokens that are scored lie before it.

    Returns:
        Of each row float64 `[T]`, the negative log-likelihoods in nats, and bool `[T]`, whether greedy decoding
        would have chosen the token.
    """
    block, batch = cache.layout.block, len(rows)
    counts = np.array([len(row) for row in rows])
    padded = np.zeros((batch, int(counts.max()) + block), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    see = see or (lambda at, logits: None)
    see(0, logits[:, None])
    parts = [token_scores(logits[:, None], jnp.asarray(padded[:, :1]))]
    cache = refresh(method, cache, bases=bases)
    for begin in range(0, int(counts.max()) - 1, block):
        here = np.clip(counts - 1 - begin, 0, block)  # the last token predicts nothing that is scored
        inputs, targets = (jnp.asarray(padded[:, at : at + block]) for at in (begin, begin + 1))
        cache, logits = extend(
            method, model.config, model.params, cache, inputs, jnp.asarray(here, jnp.int32), bases=bases,
            all_logits=True,
        )
        see(begin + 1, logits)
        parts.append(token_scores(logits, targets))
        cache = refresh(method, cache, bases=bases)
    nll, greedy = (np.concatenate([to_host(part) for part in side], axis=1) for side in zip(*parts, strict=True))
    return [(nll[i, :n].astype(np.float64), greedy[i, :n]) for i, n in enumerate(counts)]


def score_through_cache(
    method: Part, model: Any, cache: Cache, logits: jax.Array, tokens: np.ndarray, *, bases: Any = None,
    predictions: Predictions | None = None,
) -> Perplexity:
    """`score_rows` of continuations of one length, int32 `[B, T]`.

    Args:
        predictions: the full cache's; a full cache fills them.
    """
    rows, pieces = np.asarray(tokens, np.int32).tolist(), []

    def see(at: int, logits: jax.Array) -> None:
        assert predictions is not None
        if method.name == "full":
            predictions.keep(logits)
        pieces.append(predictions.divergence(at, logits))

    scored = score_rows(method, model, cache, logits, rows, bases=bases, see=see if predictions else None)
    divergence = np.concatenate(pieces, axis=1)[:, : tokens.shape[1]] if pieces else None
    return Perplexity(np.stack([nll for nll, _ in scored]), divergence)


class Scored(NamedTuple):
    """Of one method: its spec, the size of its cache (one row), likelihoods, and the seconds that scoring took."""

    spec: str
    size: Size
    perplexity: Perplexity
    seconds: float


def score_many(
    model: Any, methods: Mapping[str, Part], tokens: np.ndarray, prefix: int, *, bases: Mapping[str, Any],
    dtype: Any = None, mesh: Any = None, clock: PrefillClock | None = None, prefill_chunk: int | None = None,
    block: int | None = None,
) -> Iterator[Scored]:
    """`perplexity` of several methods from one prefill, which is done when this returns; each is scored when it is asked
    for, the full cache first.

    Args:
        methods, bases: by spec.
        dtype, mesh, clock, block: as of `prefill_many`; `prefill_chunk` is its `chunk`.
    """
    context = jnp.asarray(tokens[:, :prefix], jnp.int32)
    caches, logits = prefill_many(
        methods, model.config, model.params, context, bases=bases, capacity=tokens.shape[1], dtype=dtype, mesh=mesh,
        clock=clock, chunk=prefill_chunk, block=block,
    )

    exact = [spec for spec, method in methods.items() if method.name == "full"][:1]
    predictions = Predictions()

    def score(spec: str) -> Scored:
        cache, own = caches.pop(spec), bases.get(spec)
        size, aside, begin = size_of(cache, own), predictions.seconds, time.perf_counter()
        found = score_through_cache(
            methods[spec], model, cache, logits.pop(spec), tokens[:, prefix:], bases=own,
            predictions=predictions if exact else None,
        )
        return Scored(spec, size, found, time.perf_counter() - begin - (predictions.seconds - aside))

    return map(score, sorted(methods, key=lambda spec: spec not in exact))


def perplexity(
    model: Any, method: Part, tokens: np.ndarray, prefix: int, *, bases: Any = None,
    block: int | None = None, dtype: Any = None,
) -> Perplexity:
    """Prefill and compress the first `prefix` tokens of each row `[B, S]`, and score the rest through the
    cache.

    Raises:
        ValueError: a prefix that leaves nothing to compress or nothing to score; see also `prefill`.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or not 1 <= prefix < tokens.shape[1]:
        raise ValueError(f"prefix={prefix}: must lie in 1..{tokens.shape[-1] - 1} for tokens {tokens.shape}")
    cache, logits = prefill(
        method, model.config, model.params, jnp.asarray(tokens[:, :prefix]), bases=bases,
        capacity=tokens.shape[1], block=block, dtype=dtype,
    )
    return score_through_cache(method, model, cache, logits, tokens[:, prefix:], bases=bases)
