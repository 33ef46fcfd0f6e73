"""The attention kernels of a GPU, launched otherwise than they would be: stages, warps, tiles and waves, one at a time.

Every launch is checked against the op on XLA, over the same tokens, before it is timed.
"""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.evals.speed.kernels import LAST_LEVEL_CACHE
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.compile_grid import KV_HEADS, PLAIN, ROTARY, Program, arguments
from lowrank_kv_jax.pallas_kernels.gpu_grid import Tuning, tuned
from lowrank_kv_jax.pallas_kernels.packing import TILE_OF_SCALES
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention.angles import DIGIT
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.positions import PerHead

KERNELS = (
    *(Program(PLAIN, r, r) for r in (128, 64, 32)), Program(PLAIN, 64, 64, dtype="int8"),
    *(Program(PLAIN, 128, 128, dtype=f"tiles{bits}") for bits in (2, 4)),
    Program(PLAIN, 128, 128, dtype="mixed"), *(Program(PLAIN, r, r, dtype="mixed", joint=True) for r in (512, 1024)),
    *(Program(ROTARY, r, r) for r in (64, 32)), Program(ROTARY, 64, 64, dtype="int8"),
    *(Program(ROTARY, r, r, joint=True) for r in (256, 512)), Program(ROTARY, 64, 64, chosen=True),
    Program(ROTARY, 128, 128, dtype="mixed"), Program(ROTARY, 512, 512, dtype="mixed", joint=True),
    Program(ROTARY, 128, 128, dtype="mixed", turned=True),
    Program(ROTARY, 512, 512, dtype="mixed", joint=True, turned=True),
)
"""What is swept, at each batch."""

TUNINGS = (
    Tuning(), *(Tuning(stages=n) for n in (2, 4)), *(Tuning(warps=n) for n in (2, 4, 8)),
    *(Tuning(tile=n) for n in (64, 256)), *(Tuning(waves=n) for n in (1, 4)),
)
FEW = (Tuning(), Tuning(waves=1), Tuning(waves=4))
BATCHES = {8: TUNINGS, 1: FEW}
"""How they are launched, by rows of the batch."""

XLA, PEER = "xla", "cuDNN"
"""The op on XLA, and full-rank attention as JAX has it of cuDNN: what launches are compared with."""

MOST_BUFFERS = 8
ALLOWED = 2e-2  # of an output's norm: 16-bit products in another order
ROUND_SECONDS, ROUNDS = 4e-3, 7


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's program, launched in one way.

    Attributes:
        program: what is attended.
        tuning: how, or XLA or PEER.
        seconds: of a call, median; None where it failed.
        bytes: of tokens that it reads.
        error: norm of what its output is off XLA's, over the norm of that.
        failure: why there is no time.
    """

    program: Program
    tuning: Tuning | str
    seconds: float | None = None
    bytes: int = 0
    error: float | None = None
    failure: str | None = None

    def way(self) -> str:
        """For a table: "stages=3", "as it is", or what it is compared with."""
        if isinstance(self.tuning, str):
            return self.tuning
        given = [f"{name}={value}" for name, value in self.tuning._asdict().items() if value is not None]
        return " ".join(given) or "as it is"


def sweep(
    programs: Sequence[Program] = KERNELS, batches: Mapping[int, Sequence[Tuning]] = BATCHES, *, workers: int = 12,
    seed: int = 0, on_program: Callable[[list[Launch]], None] = lambda launches: None,
) -> list[Launch]:
    """Every program at every batch, on XLA and launched in each way: compiled side by side, then timed one by one.

    Args:
        batches: ways, by rows of the batch.
        workers: threads that compile.
        on_program: given the launches of each program as they are done.
    """
    cases = [(dataclasses.replace(x, batch=batch), _able(x, ways)) for batch, ways in batches.items() for x in programs]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        compiled = [
            (case, pool.submit(_drawing, case),
             {way: pool.submit(_compiled, case, way) for way in (*_beside(case), *ways)})
            for case, ways in cases
        ]
    found: list[Launch] = []
    for case, drawing, programs_of in compiled:
        own = list(_timed(case, drawing.result(), programs_of, seed))
        on_program(own)
        found += own
    return found


def _able(program: Program, ways: Sequence[Tuning]) -> list[Tuning]:
    """Those ways that a program can be launched in: a table of the places within a tile turns keys, and a scale of 8 bits
    is of 128 tokens."""
    placed = program.op == ROTARY and not (program.chosen or program.turned)
    most = min([DIGIT] * placed + [TILE_OF_SCALES] * (program.dtype == "int8"), default=math.inf)
    return [way for way in ways if (way.tile or 0) <= most]


def _beside(program: Program) -> tuple[str, ...]:
    """What a program is compared with."""
    full = program.op == PLAIN and program.dtype == "bfloat16" and program.rank_k == program.rank_v == program.head_dim
    return (XLA, PEER) if full else (XLA,)


def _compiled(program: Program, way: Tuning | str) -> tuple[Any, Any]:
    """A chain of calls over as many buffers as no cache holds, and one call."""
    call = jax.jit(functools.partial(_attend, program, way))
    q, tokens, *rest = jax.eval_shape(functools.partial(_as_read, way), arguments(program, "sm_90")[1])

    def chain(q, buffers):
        for buffer in buffers:
            out = call(q, *buffer)
            q = q + (0 * out[..., :1]).astype(q.dtype)  # the next call waits for this one
        return q

    with tuned(Tuning() if isinstance(way, str) else way):
        lowered = jax.jit(chain).lower(q, [(tokens, *rest)] * _buffers(program)), call.lower(q, tokens, *rest)
    return lowered[0].compile(), lowered[1].compile()


def _as_read(way: Tuning | str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as what reads them has them: cuDNN's tokens lie before its heads."""
    if way != PEER:
        return args
    q, tokens, *rest = args
    return q, tokens._replace(keys=tokens.keys.swapaxes(1, 2), values=tokens.values.swapaxes(1, 2)), *rest


def _attend(program: Program, way: Tuning | str, q, tokens, positions, *basis) -> jax.Array:
    scale = program.head_dim**-0.5
    if way == PEER:
        return jax.nn.dot_product_attention(
            q, tokens.keys, tokens.values, scale=scale, key_value_seq_lengths=tokens.lengths, implementation="cudnn")
    common: dict[str, Any] = dict(
        scale=scale, q_positions=positions, causal=False, window=None, backend=XLA if way == XLA else "triton")
    if program.op == PLAIN:
        return coefficient_attention(q, tokens, **common).out
    return rotary_coefficient_attention(
        q, tokens, basis[0], rope=RopeSpec(500000.0, program.head_dim), kv_heads=KV_HEADS, value_basis=None,
        key_mean=basis[1], origin=0 if program.turned else None, **common).out


def _timed(program: Program, drawing: Any, compiled: Mapping[Tuning | str, Any], seed: int) -> Iterator[Launch]:
    """Each way checked against the first, then all of them timed in turns: a device's clock does not stand still."""
    drawn = [drawing(seed + i) for i in range(_buffers(program))]
    wanted, errors, ways, failures = None, {}, {}, {}
    for way, future in compiled.items():
        try:
            chain, call = future.result()
            out = np.asarray(call(*_as_read(way, drawn[0])), np.float64)
            wanted = out if wanted is None else wanted
            errors[way] = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
            if not errors[way] < ALLOWED:
                raise ValueError(f"errs by {errors[way]:.2g} of XLA's, allowed is {ALLOWED}")
            ways[way] = functools.partial(chain, drawn[0][0], [_as_read(way, x)[1:] for x in drawn])
        except Exception as reason:  # a compiler raises what it likes, and so does a device
            failures[way] = " ".join(str(reason).split())[:200] or type(reason).__name__
    seconds = _seconds(ways)
    for way in compiled:
        if way in failures:
            yield Launch(program, way, failure=failures[way])
        else:
            yield Launch(program, way, seconds[way] / len(drawn), _bytes(program), errors[way])


def _drawing(program: Program) -> Any:
    """`random_arguments`, compiled."""
    return jax.jit(functools.partial(random_arguments, program)).lower(jax.ShapeDtypeStruct((), jnp.int32)).compile()


def _seconds(ways: Mapping[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Of a call of each, medians of rounds; dispatched one behind the other, so that no device waits for its host."""

    def round_of(run: Callable[[], Any], calls: int) -> float:
        begin, out = time.perf_counter(), None
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / calls

    calls = {way: max(3, min(50, math.ceil(ROUND_SECONDS / max(round_of(run, 2), 1e-6)))) for way, run in ways.items()}
    taken = [{way: round_of(run, calls[way]) for way, run in ways.items()} for _ in range(ROUNDS)]
    return {way: float(np.median([each[way] for each in taken])) for way in ways}


def _buffers(program: Program) -> int:
    cache = LAST_LEVEL_CACHE["cpu" if jax.default_backend() == "cpu" else "gpu"]
    return max(2, min(MOST_BUFFERS, math.ceil(4 * cache / _bytes(program))))


def _bytes(program: Program) -> int:
    tokens = arguments(program, "sm_90")[1][1]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((tokens.keys, tokens.values)))


def random_arguments(program: Program, seed: int | jax.Array) -> tuple[Any, ...]:
    """Arrays in the shapes of `arguments`: random numbers and codes, all tokens valid, queries behind them."""
    _, (q, tokens, positions, *basis) = arguments(program, "sm_90")
    draw = functools.partial(_random, iter(jax.random.split(jax.random.key(seed), 64)))
    small = 2.0**-6 if program.dtype == "mixed" else 1.0  # what is packed reads as numbers of up to 8 bits
    keys, values = (jax.tree.map(draw, side) for side in (tokens.keys, tokens.values))
    where = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tokens.positions)
    if isinstance(where, PerHead):
        each = jnp.broadcast_to(jnp.arange(program.size, dtype=jnp.int32), where.position.shape)
        where = dataclasses.replace(where, position=each)
    lengths, behind = (jnp.full(x.shape, program.size, jnp.int32) for x in (tokens.lengths, positions))
    rest = [None if x is None else draw(x, small * program.rank_k**-0.5) for x in basis]
    return draw(q, 1.0 if basis else small), CachedTokens(keys, values, lengths, where), behind, *rest


def _random(keys: Iterator[jax.Array], x: Any, size: float = 1.0) -> jax.Array:
    """Codes of any value, scales (16 bits that stand for small bfloat16 numbers), normal numbers of a `size`."""
    key = next(keys)
    if x.dtype in (jnp.uint8, jnp.int8):
        return jax.random.bits(key, x.shape, jnp.uint8).astype(x.dtype)
    if x.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(0.05 * jax.random.normal(key, x.shape, jnp.bfloat16), jnp.uint16)
    return (size * jax.random.normal(key, x.shape, jnp.float32)).astype(x.dtype)


def records(launches: Sequence[Launch], bandwidth: float, seed: int) -> list[dict[str, Any]]:
    """One record for each launch."""
    return [
        make_record(
            "bench kernels --sweep", method=str(launch.program), task=launch.way(), length=launch.program.size, seed=seed,
            seconds=launch.seconds, read_bytes=launch.bytes, error=launch.error, failure=launch.failure,
            copy_bytes_per_second=bandwidth, tuning=None if isinstance(launch.tuning, str) else launch.tuning._asdict(),
            program=dataclasses.asdict(launch.program),
        )
        for launch in launches
    ]
