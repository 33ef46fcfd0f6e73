"""Generation: prompts in, tokens out, the loop on the device in blocks with a refresh between them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key, UInt32

from lowrank_kv_jax.checks.arrays import array_of
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.checks.models import check_model
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.generation.chunks import read_chunk
from lowrank_kv_jax.generation.forward import decode_step, extend, logits_of, prefill, refresh
from lowrank_kv_jax.generation.prompts import check_lengths, check_new_tokens, encode_prompts, pad_prompts, rows_of_ids
from lowrank_kv_jax.generation.sampling import Sampler, sample
from lowrank_kv_jax.method import Fault, Part
from lowrank_kv_jax.method.cache import Cache, check_method, fork
from lowrank_kv_jax.method.describe import as_html, as_text
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.parse import as_method
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.storage.cache_dtype import floating
from lowrank_kv_jax.storage.sharding import beside, replicate, shard_rows, to_host

GREEDY = Sampler()
NEXT_TURN = 64  # tokens of one more turn that a cache has room for by default, beside its answer


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: generated ids of each prompt's row, the end-of-sequence token excluded.
        texts: the same, decoded; None without a tokenizer.
        cache: the compressed cache. It holds the prompt and the generated tokens but the last one of each row.
        last: int32, that last token of each prompt's row; it goes before the next turn.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    cache: Cache
    last: Int[jax.Array, " B"]

    __repr__, _repr_html_ = as_text, as_html


class Progress(NamedTuple):
    """Carried by the decode loop, `[B]` each: the last token, whether a row has ended, and whether by logits of NaN."""

    token: Int[jax.Array, " B"]
    done: Bool[jax.Array, " B"]
    broken: Bool[jax.Array, " B"]


@functools.partial(
    jax.jit, static_argnames=("method", "config", "eos"), donate_argnames=("cache", "progress")
)
def decode_block(
    method: Part, config: ModelConfig, params: Any, cache: Cache, progress: Progress,
    keys: Key[jax.Array, " B"], steps: Int[jax.Array, ""], *, bases: Any = None, sampler: Sampler = GREEDY,
    eos: tuple[int, ...] = (),
) -> tuple[Cache, Progress, Int[jax.Array, "B block"]]:
    """Up to `steps` decode steps on the device, then `refresh`; ends early when every row has ended.

    Args:
        cache: donated; refreshed.
        progress: donated.
        keys: PRNG keys `[B]`; a draw depends on its row's key and its position in the text.
        steps: int32 scalar in 1..block, traced.
        sampler: its numbers are traced, too.

    Returns:
        Cache, progress, and the tokens drawn, int32 `[B, block]`, -1 where none was: behind the end of a row, and where
        its logits were NaN.
    """
    def go_on(carry):
        _, progress, _, i = carry
        return (i < steps) & ~jnp.all(progress.done)

    def step(carry):
        cache, progress, out, i = carry
        cache, logits = decode_step(method, config, params, cache, progress.token, bases=bases, active=~progress.done)
        progress, out = _drawn(progress, logits, keys, cache.length, out, i, sampler, eos)
        return cache, progress, out, i + 1

    out = _none_drawn(cache)
    cache, progress, out, _ = jax.lax.while_loop(go_on, step, (cache, progress, out, jnp.int32(0)))
    return refresh(method, cache, bases=bases), progress, out


def decode_block_by_layers(
    method: Part, config: ModelConfig, params: Any, cache: Cache, progress: Progress,
    keys: Key[jax.Array, " B"], steps: Int[jax.Array, ""], *, bases: Any = None, sampler: Sampler = GREEDY,
    eos: tuple[int, ...] = (),
) -> tuple[Cache, Progress, Int[jax.Array, "B block"]]:
    """`decode_block`, not to be traced: each layer a program that equal layers share, which compiles in seconds whatever
    the depth. The host dispatches them for every token, ahead of the device, and no step is left out once all rows ended.
    """
    out = _none_drawn(cache)
    for i in range(int(steps)):
        cache, logits = decode_step(method, config, params, cache, progress.token, bases=bases, active=~progress.done)
        progress, out = _draw(progress, logits, keys, cache.length, out, np.int32(i), sampler, eos)
    return refresh(method, cache, bases=bases), progress, out


def _none_drawn(cache: Cache) -> jax.Array:
    """A block of tokens, none of which is drawn yet."""
    return jnp.full((cache.layout.batch, cache.layout.block), -1, jnp.int32)


def _drawn(
    progress: Progress, logits: jax.Array, keys: jax.Array, length: jax.Array, out: jax.Array, i: jax.Array,
    sampler: Sampler, eos: tuple[int, ...],
) -> tuple[Progress, jax.Array]:
    """After a step: a token of each row that goes on, written into column `i` of `out`."""
    broken = progress.broken | (~progress.done & jnp.any(jnp.isnan(logits), axis=-1))
    over = progress.done | broken
    token = jnp.where(over, progress.token, sample(sampler, logits, keys, length))
    done = over | jnp.any(token[:, None] == jnp.asarray(eos, jnp.int32)[None], axis=1)
    return Progress(token, done, broken), out.at[:, i].set(jnp.where(over, -1, token))


_draw = jax.jit(_drawn, static_argnums=7, donate_argnums=(0, 4))


def ingest(
    method: Part | str, config: ModelConfig, params: Any, cache: Cache, tokens: Sequence[Sequence[int]], *,
    bases: Any = None, chunk: int | None = None,
) -> tuple[Cache, Float[jax.Array, "B V"]]:
    """Append a turn of any length to every row, block by block, refreshing in between.

    Args:
        cache: consumed; `fork` it first to keep it.
        tokens: ids for each row, at least one a row.
        chunk: instead of blocks of `layout.block` tokens, chunks of any size: each attends exactly to itself and to all
            that the cache holds, and is compressed as if its tokens had been decoded.

    Returns:
        The refreshed cache and logits `[B, V]` at each row's last token.

    Raises:
        ValueError: what is no row of ids, an empty row, a row that outgrows the capacity, ids outside of the vocabulary,
            or `chunk` below 1.
    """
    method = as_method(method)
    check_method(cache, method)
    if chunk is not None:
        check_int("chunk", chunk, 1)
    tokens = rows_of_ids("tokens", tokens)
    counts = np.array([len(row) for row in tokens])
    if len(tokens) != cache.layout.batch or (counts == 0).any():
        raise ValueError(f"tokens: expected {cache.layout.batch} rows of at least one token, got lengths "
                         f"{counts.tolist()}")
    wrong = [token for row in tokens for token in row if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(f"tokens hold id {wrong[0]}: ids lie in 0..{config.vocab_size - 1}")
    check_room(cache, counts)
    return _ingest(method, config, params, cache, tokens, bases, chunk)


def _ingest(
    method, config, params, cache: Cache, tokens: Sequence[Sequence[int]], bases, chunk: int | None
) -> tuple[Cache, jax.Array]:
    """`ingest`, unchecked: a row may be empty, and stays as it is."""
    layout, longest = cache.layout, max(len(row) for row in tokens)
    cache, last = refresh(method, cache, bases=bases), None
    if chunk is not None:
        size = width_of_turn(longest, chunk, layout.block)
        for piece in _pieces(tokens, size):
            cache, last = read_chunk(method, config, params, cache, *piece, last, bases=bases, of_prompt=False)
        return cache, logits_of(config, params, last)[:, 0]
    for piece in _pieces(tokens, layout.block):
        cache, logits = extend(method, config, params, cache, *piece, bases=bases)
        cache = refresh(method, cache, bases=bases)
        last = logits if last is None else jnp.where((piece[1] > 0)[:, None], logits, last)
    assert last is not None
    return cache, last


def width_of_turn(tokens: int, chunk: int, block: int) -> int:
    """Tokens that a turn of so many is read at a time: `block`, doubled until they fit, `chunk` at the most, so that
    turns of similar length share their programs."""
    width = block
    while width < min(tokens, chunk):
        width *= 2
    return min(width, chunk)


def _pieces(rows: Sequence[Sequence[int]], size: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """`size` tokens of each row at a time, int32 `[B, size]`, and how many of them there are."""
    lengths = np.array([len(row) for row in rows])
    for begin in range(0, int(lengths.max()), size):
        padded, counts = np.zeros((len(rows), size), np.int32), np.clip(lengths - begin, 0, size)
        for row, ids in enumerate(rows):
            padded[row, : counts[row]] = ids[begin : begin + size]
        yield jnp.asarray(padded), jnp.asarray(counts, jnp.int32)


def check_room(cache: Cache, counts: Int[np.ndarray, " n"], answer: int = 0) -> None:
    """Raise ValueError where `counts` `[n]` more tokens, and then `answer` more, do not fit into a cache's first rows."""
    rows = slice(len(counts))
    over = to_host(cache.length)[rows] + counts + answer - to_host(cache.limit)[rows]
    if (over > 0).any():
        row, capacity = int(np.argmax(over)), cache.layout.capacity
        raise ValueError(f"row {row} would outgrow the cache by {int(over[row])} tokens: give `generate` (or `prefill`) "
                         f"capacity={capacity + int(over[row])} or more in the first turn, it was {capacity}")


def decode(
    method: Part, config: ModelConfig, params: Any, cache: Cache, logits: Float[jax.Array, "B V"],
    max_new_tokens: int, *, bases: Any = None, sampler: Sampler = GREEDY,
    seeds: Sequence[int] | np.ndarray | int = 0, eos: Sequence[int] = (), rows: int | None = None,
    by_layers: bool = False,
) -> Iterator[tuple[Int[np.ndarray, "B n"], Cache, Progress]]:
    """Generate after a prefill or a turn, yielding a block of new tokens `[B, n]` (-1: none) at a time.

    Args:
        cache: consumed. Each yielded cache is consumed by the next step of the iterator.
        logits: `[B, V]` of the last token.
        rows: the first ones that are generated; what is yielded of others means nothing. None means all.
        by_layers: see `generate`.

    Raises:
        ValueError: seeds that are not one for all rows or one a row.
        Fault: logits are NaN (a cache that was fed beyond its block or capacity, broken weights), or the method reports
            that its state broke; blocks yielded before are good.
    """
    keys = jax.vmap(jax.random.key)(jnp.asarray(row_seeds(seeds, cache.layout.batch)))
    eos = tuple(eos)
    token = sample(sampler, logits, keys, cache.length)
    idle = jnp.asarray(np.arange(len(token)) >= (len(token) if rows is None else rows))
    done = idle | jnp.any(token[:, None] == jnp.asarray(eos, jnp.int32)[None], axis=1)
    progress = Progress(token, done, ~idle & jnp.any(jnp.isnan(logits), axis=-1))
    stop_on_fault(cache, progress, 0)
    if int(to_host(cache.pending)):  # tokens were appended since the last refresh: a whole block may not fit any more
        cache = refresh(method, cache, bases=bases)
    yield to_host(token)[:, None], cache, progress
    cache, progress = _placed(cache, progress, params, bases)
    run, left = decode_block_by_layers if by_layers else decode_block, max_new_tokens - 1
    while left > 0 and not bool(progress.done.all()):
        steps = min(left, cache.layout.block)
        cache, progress, out = run(
            method, config, params, cache, progress, keys, jnp.int32(steps), bases=bases, sampler=sampler, eos=eos
        )
        left -= steps
        stop_on_fault(cache, progress, max_new_tokens - 1 - left)
        yield to_host(out)[:, :steps], cache, progress


def _placed(cache: Cache, progress: Progress, params: Any, bases: Any) -> tuple[Cache, Progress]:
    """With all small arrays where `decode_block` will leave them: elsewhere its second turn would be another program."""
    mesh, length, limit, pending = cache.layout.mesh, cache.length, cache.limit, cache.pending
    if mesh is None:
        length, limit, pending, *rows = beside((length, limit, pending, *progress), cache.groups, params, bases)
    else:
        pending, rows = replicate(mesh, pending), shard_rows(mesh, *progress)
    return dataclasses.replace(cache, length=length, limit=limit, pending=pending), Progress(*rows)


def stop_on_fault(cache: Cache, progress: Progress, step: int) -> None:
    """Raise `Fault` where logits were NaN or the method found that its state broke, `step` steps after the prompt."""
    found = machine_of(cache.method).fault(cache.groups)
    broken = to_host(progress.broken)
    if found is None and broken.any():
        found = f"the logits of row {int(np.argmax(broken))} are NaN"
    if found is not None:
        raise Fault(f"{cache.method.name}: {found}, {'at prefill' if step == 0 else f'by decode step {step}'}")


def row_seeds(seeds: Sequence[int] | np.ndarray | int, rows: int) -> UInt32[np.ndarray, " B"]:
    """A seed for each row, uint32 `[B]`.

    Raises:
        ValueError: neither one seed nor one a row, or seeds outside of 0..2**32 - 1.
    """
    found = array_of("seeds", seeds)
    if found.shape not in ((), (rows,)) or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(f"seeds={short(seeds)}: give one integer, or one for each of the {rows} rows")
    found = np.asarray(found)
    if (found < 0).any() or (found >= 2**32).any():
        raise ValueError(f"seeds={short(seeds)}: must lie in 0..2**32 - 1")
    return np.broadcast_to(found.astype(np.uint32), (rows,))


def generate(
    model: Any, method: Part | str, prompts: str | Sequence[str] | Sequence[Sequence[int]], *, bases: Any = None,
    max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None, top_p: float = 1.0,
    seeds: Sequence[int] | int = 0, stop_at_eos: bool = True, cache: Cache | Generation | None = None,
    batch: int | None = None, block: int | None = None, capacity: int | None = None, prefill_chunk: int | None = None,
    dtype: Any = None, mesh: jax.sharding.Mesh | None = None, by_layers: bool = False,
    on_tokens: Callable[[Int[np.ndarray, "B n"]], None] | None = None,
) -> Generation:
    """Generate from a compressed cache.

    Args:
        model: from `load_model`.
        method: how the cache is compressed, or its spec (see `parse_method`).
        prompts: texts or rows of ids; their lengths may differ.
        bases: from `calibrate`, where the method needs them.
        max_new_tokens: at most so many a row.
        temperature, top_k, top_p: see `Sampler`; the default is greedy.
        seeds: one for all rows or one a row; a row's text depends on its own seed only, so that equal prompts need
            different ones (`seeds=range(n)`) to be continued differently.
        stop_at_eos: end a row at the model's end-of-sequence tokens.
        cache: continue a conversation: `prompts` is the next turn. With the `Generation` of the turn before, its last
            token, which no cache holds yet, is put in front; with a bare cache, `prompts` must hold all that is new.
            Texts go on: no token that opens a sequence is put before them.
            The cache is kept, not consumed; batch, block, capacity, dtype and mesh are its own.
        batch: rows of the cache, by default one for each prompt. Those beyond the prompts stay empty, so that calls
            with 1 to `batch` prompts share their compiled programs; each takes the bytes and the time of a row, and
            `take_rows` leaves it out.
        block: decode steps between two refreshes; by default as many as the method asks for, see `prefill`.
        capacity: longest conversation, in tokens. By default the padded prompts, `max_new_tokens` and room for one more
            turn, `NEXT_TURN` tokens and as long an answer, within the model's context. Free slots take bytes: where no
            turn follows, prompt and `max_new_tokens` are enough; several turns need more, from the first one on.
        prefill_chunk: read prompts so many tokens at a time, and compress between them: `chunk` of `prefill`, and of
            `ingest` where a conversation goes on.
        dtype: of the cache, `default_cache_dtype()` (bfloat16) by default.
        mesh: lay the cache out over these devices, see `prefill`; the model must lie on the same mesh.
        by_layers: compile decoding as prefill is, a program for a layer that equal layers share, instead of one of the
            whole model, whose compilation takes the longer the more layers there are. The same tokens; worth it for
            short answers of deep models, as the host then dispatches every layer of every token.
        on_tokens: called with each block of new tokens `[prompts, n]` (-1: none) as soon as it is there.

    Raises:
        ValueError: empty prompts, more of them than `batch`, prompts and new tokens beyond the capacity or the model's
            context, `max_new_tokens` below 1, or a spec that spells no method.
    """
    check_int("max_new_tokens", max_new_tokens, 1)
    for name, value in (("batch", batch), ("block", block), ("capacity", capacity), ("prefill_chunk", prefill_chunk)):
        if value is not None:
            check_int(name, value, 1)
    if on_tokens is not None and not callable(on_tokens):
        raise ValueError(f"on_tokens={short(on_tokens)}: must be callable, or None")
    check_model(model)
    method, rows = as_method(method), encode_prompts(model, prompts, opening=cache is None)
    config, params = model.config, model.params
    sampler, eos = Sampler(temperature, top_k, top_p), config.eos_ids if stop_at_eos else ()
    count, own_seeds = len(rows), row_seeds(seeds, len(rows))
    if cache is None:
        found = _first_turn(model, method, rows, max_new_tokens, batch, capacity, prefill_chunk, bases=bases,
                            block=block, dtype=dtype, mesh=mesh)
    else:
        _check_continued(cache, count, {"batch": batch, "block": block, "capacity": capacity, "mesh": mesh,
                                        "dtype": None if dtype is None else floating(dtype).name})
        found = _next_turn(model, method, cache, rows, max_new_tokens, prefill_chunk, bases)
    state, logits = found
    blocks, progress = [], None
    for new, state, progress in decode(  # noqa: B007, B020
        method, config, params, state, logits, max_new_tokens, bases=bases, sampler=sampler, eos=eos, rows=count,
        by_layers=by_layers, seeds=np.pad(own_seeds, (0, state.layout.batch - count)),
    ):
        blocks.append(new[:count])
        if on_tokens is not None:
            on_tokens(new[:count])
    out = [[int(t) for t in row if t >= 0 and t not in eos] for row in np.concatenate(blocks, axis=1)]
    texts = None if model.tokenizer is None else [model.tokenizer.decode(row) for row in out]
    assert progress is not None
    return Generation(out, texts, state, jax.device_put(to_host(progress.token)[:count]))


def _first_turn(
    model: Any, method: Part, rows: list[list[int]], max_new_tokens: int, batch: int | None, capacity: int | None,
    chunk: int | None, **options: Any,
) -> tuple[Cache, jax.Array]:
    """A new cache with the prompts, and logits `[B, V]` behind them; arguments as of `generate` and `prefill`."""
    config, count = model.config, len(rows)
    if batch is not None and count > batch:
        raise ValueError(f"batch={batch}: there are {count} prompts; it must be at least that")
    check_new_tokens(max_new_tokens, config.context)
    longest = config.context - max_new_tokens
    if capacity is not None:
        needed = max(map(len, rows)) + max_new_tokens - 1  # the last token drawn is not cached
        if needed > capacity and capacity < config.context:
            raise ValueError(f"capacity={capacity}: the longest prompt and max_new_tokens={max_new_tokens} need {needed}")
        longest = min(longest, capacity - max_new_tokens + 1)
    check_lengths(rows, longest, max_new_tokens, config.context)
    tokens, lengths = pad_prompts(rows + [[0]] * ((batch or count) - count), longest)
    if capacity is None:
        capacity = min(tokens.shape[1] + 2 * max_new_tokens + NEXT_TURN, config.context)
    return prefill(method, config, model.params, tokens, lengths, capacity=capacity, chunk=chunk, **options)


def _next_turn(
    model: Any, method: Part, cache: Cache | Generation, rows: list[list[int]], max_new_tokens: int, chunk: int | None,
    bases: Any,
) -> tuple[Cache, jax.Array]:
    """A copy of a conversation's cache with the next turn, and logits `[B, V]` behind it; arguments as of `generate`."""
    if isinstance(cache, Generation):
        rows = [[token, *row] for token, row in zip(to_host(cache.last).tolist(), rows, strict=True)]
        cache = cache.cache
    check_room(cache, np.array([len(row) for row in rows]), max_new_tokens - 1)  # the last token drawn is not cached
    rows = rows + [[]] * (cache.layout.batch - len(rows))
    return _ingest(method, model.config, model.params, fork(cache), rows, bases, chunk)


def _check_continued(cache: Cache | Generation, count: int, wanted: dict[str, Any]) -> None:
    """Raise ValueError unless `count` prompts can continue a conversation, in a cache that is as `wanted`."""
    if not isinstance(cache, Cache | Generation):
        raise ValueError(f"cache={short(cache)}: must be what `generate`, `prefill` or `load_cache` returned")
    held = (cache.cache if isinstance(cache, Generation) else cache).layout
    rows = len(cache.tokens) if isinstance(cache, Generation) else held.batch
    if count != rows:
        raise ValueError(f"prompts has {count} rows: the conversation that they continue has {rows}")
    for name, value in wanted.items():
        if value is not None and value != getattr(held, name):
            raise ValueError(f"{name}={value!r}: the conversation goes on in its cache, which was made with "
                             f"{getattr(held, name)!r}")
