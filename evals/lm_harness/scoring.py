"""Log-likelihoods of continuations through the compressed caches of their contexts."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from lowrank_kv_jax.evals.asking.batches import coarse
from lowrank_kv_jax.evals.asking.clock import PrefillClock
from lowrank_kv_jax.evals.asking.prefill_many import pad_rows, prefill_many
from lowrank_kv_jax.evals.perplexity.score import score_rows
from lowrank_kv_jax.evals.results.sizes import Size, size_of
from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.cache import fork

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Scored:
    """A continuation.

    Attributes:
        logprob: in nats, of all of its tokens.
        greedy: whether greedy decoding would have produced it.
        size: of the cache that it was scored through, one row.
        ttft_s: of the prefill whose batch it was in, which predicts its first token; None where that was compiled first.
    """

    logprob: float
    greedy: bool
    size: Size
    ttft_s: float | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """What is compressed, and what is appended to it of which the last `scored` tokens count."""

    head: Ids
    tail: Ids
    scored: int


def make_pair(context: Sequence[int], continuation: Sequence[int], longest: int) -> Pair:
    """Cut a context in front of its last token, so that every token of the continuation is predicted through the
    cache.

    A context of one token is left whole: there is nothing before it to compress. What is longer than the model's
    context loses its beginning, as in lm-eval.

    Raises:
        ValueError: an empty context or continuation, or a continuation that fills the model's context.
    """
    if not context or not continuation:
        raise ValueError(f"context and continuation need at least one token each, got {len(context)} and "
                         f"{len(continuation)}")
    if len(continuation) > longest:
        raise ValueError(f"a continuation has {len(continuation)} tokens: the model's context is {longest}")
    # the last token of a continuation predicts nothing and is not appended
    kept = tuple(context)[-max(1, longest + 1 - len(continuation)) :]
    cut = max(1, len(kept) - 1)
    return Pair(kept[:cut], (*kept[cut:], *continuation), len(continuation))


def score_pairs(
    model: Any, method: Part, pairs: Sequence[Pair], *, bases: Any = None, rows: int = 8, dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None, on_scored: Callable[[int], None] = lambda count: None,
    warm: set[tuple[int, int]] | None = None, prefill_chunk: int | None = None,
) -> list[Scored]:
    """Score continuations; those of one context share its prefill and its compressed cache.

    Args:
        model: config and parameters.
        rows: contexts that share a batch.
        dtype: of the caches.
        on_scored: called with the number of pairs that each batch has finished.
        warm: shapes that are compiled; others are added to it.
        prefill_chunk: `chunk` of `prefill`.

    Returns:
        One for each pair, in order.
    """
    warm = set() if warm is None else warm
    by_head: dict[Ids, list[int]] = {}
    for index, pair in enumerate(pairs):
        by_head.setdefault(pair.head, []).append(index)
    heads = sorted(by_head, key=lambda head: (len(head), head))
    found: dict[int, Scored] = {}
    longest_of = {head: max(len(pairs[i].tail) for i in own) for head, own in by_head.items()}
    for real in _together(heads, longest_of, rows, model.config.context):
        asked = [by_head[head] for head in real]
        filled = real + [real[-1]] * (rows - len(real))  # one shape, whether the batch is full or not
        width, capacity = _shape(filled, [pairs[i] for row in asked for i in row], model.config.context)
        tokens, lengths = pad_rows(filled, width)
        clock = PrefillClock()
        caches, logits = prefill_many(
            {"": method}, model.config, model.params, tokens, lengths, bases={"": bases}, capacity=capacity,
            dtype=dtype, mesh=mesh, clock=clock, chunk=prefill_chunk,
        )
        ttft_s = clock.alone("") if (width, capacity) in warm else None
        warm.add((width, capacity))
        cache = caches.pop("")
        size = size_of(cache, bases)
        for turn in range(max(map(len, asked))):
            last = turn + 1 == max(map(len, asked))
            chosen = [row[turn] if turn < len(row) else row[-1] for row in asked]
            tails = [pairs[i].tail for i in chosen]
            tails += [tails[-1]] * (rows - len(real))
            scores = score_rows(method, model, cache if last else fork(cache), logits[""], tails, bases=bases)
            for i, (nll, greedy) in zip(chosen, scores, strict=False):
                count = pairs[i].scored
                found[i] = Scored(-float(nll[-count:].sum()), bool(greedy[-count:].all()), size, ttft_s)
        on_scored(sum(map(len, asked)))
    return [found[i] for i in range(len(pairs))]


def _together(heads: Sequence[Ids], tails: Mapping[Ids, int], rows: int, longest: int) -> Iterator[list[Ids]]:
    """Batches of heads by length, in which the longest head and the longest tail fit into the model's context.

    Args:
        tails: the length of each head's longest tail, whose last token is not appended.
    """
    batch: list[Ids] = []
    for head in heads:
        tail = max(tails[own] for own in (*batch, head))
        if batch and (len(batch) == rows or len(head) + tail - 1 > longest):
            yield batch
            batch = []
        batch.append(head)
    if batch:
        yield batch


def _shape(heads: Sequence[Ids], pairs: Sequence[Pair], longest: int) -> tuple[int, int]:
    """Width of the prefill and capacity of the cache, rounded up so that few shapes are compiled."""
    longest_head, longest_tail = max(map(len, heads)), max(len(pair.tail) for pair in pairs)
    room = min(-(-longest_tail // DEFAULT_BLOCK) * DEFAULT_BLOCK, longest - longest_head)
    width = min(coarse(longest_head), longest - room)
    return width, width + room
