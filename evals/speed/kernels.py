"""Speed of the attention ops themselves: correctness first, then time over distinct buffers, against full rank."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.evals.results.figure_file import pyplot, save_figure
from lowrank_kv_jax.evals.results.records import make_record
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.storage.cache_dtype import default_cache_dtype
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.lanes import tokens_on_lanes
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.quantised import store_tokens

LAST_LEVEL_CACHE = {"cpu": 32 << 20, "gpu": 60 << 20, "tpu": 128 << 20}
"""Bytes; buffers together are four times as large, so that none is found in it."""

KERNELS = {"cpu": (), "gpu": ("triton", "mosaic_gpu"), "tpu": ("tpu",)}
MOST_CALLS = 32
PEER = "dot_product"
"""`jax.nn.dot_product_attention`, on a GPU cuDNN's; its tokens lie `[B, S, K, R]`."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is attended: B rows of S tokens, N query heads over K kv heads of D channels; `ragged` rows differ."""

    batch: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = dataclasses.field(default_factory=default_cache_dtype)
    ragged: bool = False

    def lengths(self) -> np.ndarray:
        """Valid tokens of each row, `[B]`; ragged ones from half of S to S."""
        if not self.ragged:
            return np.full(self.batch, self.length, np.int32)
        return np.linspace(self.length // 2, self.length, self.batch).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Contender:
    """An implementation of decode attention.

    Attributes:
        name: for the table.
        op: "coefficients" or "rotary".
        rank: of keys and values; head_dim for full rank.
        backend: "xla", a kernel's, or "dot_product", `jax.nn.dot_product_attention` (cuDNN's on a GPU).
        bits: 8 for quantised coefficients.
    """

    name: str
    op: str
    rank: int
    backend: str
    bits: int | None = None

    def full(self, shape: Shape) -> bool:
        """Whether it is full-rank attention, which the ratios are to."""
        return self.op == "coefficients" and self.rank == shape.head_dim and self.bits is None


@dataclasses.dataclass(frozen=True)
class Speed:
    """Median seconds of a call, the bytes of tokens that it reads, and its largest error against float64."""

    contender: Contender
    shape: Shape
    seconds: float
    all_seconds: tuple[float, ...]
    bytes: int
    error: float


def contenders(shape: Shape, ranks: Sequence[int], ops: Sequence[str], platform: str) -> list[Contender]:
    """Full rank on every backend that the platform has, and every rank and op on it."""

    def backends(op: str, rank: int) -> tuple[str, ...]:
        return tuple(b for b in KERNELS[platform] if _covers(b, op, rank, shape.dtype))

    def plain(rank: int, name: str) -> list[Contender]:
        found = ("xla", PEER, *backends("coefficients", rank))
        return [Contender(f"{name}, {b}", "coefficients", rank, b) for b in found]

    found = plain(shape.head_dim, "full rank")
    for rank in ranks:
        if "coefficients" in ops:
            found += plain(rank, f"rank {rank}")
        if "int8" in ops:
            found += [Contender(f"rank {rank} int8, {b}", "coefficients", rank, b, 8)
                      for b in ("xla", *backends("int8", rank))]
        if "rotary" in ops:
            found += [Contender(f"rank {rank} pre-RoPE, {b}", "rotary", rank, b)
                      for b in ("xla", *backends("rotary", rank))]
    return found


def _covers(backend: str, op: str, rank: int, dtype: str) -> bool:
    """Whether a kernel runs it, and does not leave it to XLA."""
    if backend == "mosaic_gpu":
        return op == "coefficients" and dtype != "float32" and rank % 16 == 0 and jax.version.__version_info__ >= (0, 12)
    return backend != "tpu" or op != "int8"


def bench(
    shape: Shape, ranks: Sequence[int], ops: Sequence[str] = ("coefficients",), *, repeats: int = 20, seed: int = 0,
    on_contender: Callable[[Contender], None] = lambda contender: None,
) -> list[Speed]:
    """Check and time every contender at one shape, alternating between them repeat by repeat.

    Raises:
        ValueError: a contender errs by more than rounding, and nothing is timed then; or a time is not above 0.
    """
    platform = "gpu" if jax.default_backend() in ("gpu", "cuda") else jax.default_backend()
    programs = []
    for contender in contenders(shape, ranks, ops, platform):
        on_contender(contender)
        programs.append(_Program(shape, contender, LAST_LEVEL_CACHE[platform], seed))
    samples: list[list[float]] = [[] for _ in programs]
    for _ in range(repeats):
        for program, taken in zip(programs, samples, strict=True):
            taken.append(program.seconds())
    medians = [float(np.median(taken)) for taken in samples]
    if min(medians) <= 0:
        raise ValueError(f"repeats={repeats}: {programs[int(np.argmin(medians))].contender.name} takes less time over "
                         f"{shape.length} tokens than these rounds differ by; give more of them, or more tokens")
    return [
        Speed(p.contender, shape, median, tuple(taken), p.bytes, p.error)
        for p, median, taken in zip(programs, medians, samples, strict=True)
    ]


class _Program:
    """N calls over distinct buffers, chained through the queries, in one jitted function; and half as many."""

    def __init__(self, shape: Shape, contender: Contender, cache_bytes: int, seed: int):
        self.contender = contender
        itemsize = 1 if contender.bits else jnp.dtype(shape.dtype).itemsize
        tokens = int(shape.lengths().sum())
        self.bytes = tokens * shape.kv_heads * 2 * contender.rank * itemsize
        calls = min(MOST_CALLS, max(2, math.ceil(4 * cache_bytes / self.bytes)))
        self._calls = calls + calls % 2
        data = [_data(shape, contender, seed + i) for i in range(self._calls)]
        self.error = _check(shape, contender, data[0])
        self._queries = data[0].q
        self._buffers = [(d.tokens, d.basis) for d in data]
        self._run = jax.jit(functools.partial(_chain, shape, contender))
        for part in (self._buffers, self._buffers[: self._calls // 2]):
            jax.block_until_ready(self._run(self._queries, part))

    def seconds(self) -> float:
        """Of one call: the difference of both lengths, so that what a dispatch costs drops out."""
        taken = []
        for part in (self._buffers, self._buffers[: self._calls // 2]):
            begin = time.perf_counter()
            jax.block_until_ready(self._run(self._queries, part))
            taken.append(time.perf_counter() - begin)
        return (taken[0] - taken[1]) / (self._calls - self._calls // 2)


@dataclasses.dataclass(frozen=True)
class _Data:
    q: jax.Array
    tokens: CachedTokens
    basis: jax.Array | None


def _data(shape: Shape, contender: Contender, seed: int) -> _Data:
    """Random tokens; NaN beyond the valid ones for the kernels, which must not touch them."""
    keys = jax.random.split(jax.random.key(seed), 4)
    lengths, rank = jnp.asarray(shape.lengths()), contender.rank
    size = (shape.batch, shape.kv_heads, shape.length, rank)
    k, v = (_stored(key, lengths, size, shape.dtype, contender.bits, contender.backend) for key in keys[:2])
    gaps = jnp.zeros((shape.batch, 2), jnp.int32)
    rotary = contender.op == "rotary"
    width = shape.head_dim if rotary else rank
    q = jax.random.normal(keys[2], (shape.batch, 1, shape.q_heads, width), shape.dtype)
    basis = None
    if rotary:
        basis = jax.random.normal(keys[3], (shape.kv_heads, shape.head_dim, rank), shape.dtype) / math.sqrt(rank)
    return _Data(q, CachedTokens(k, v, lengths, Runs(gaps, gaps)), basis)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _stored(key, lengths, size: tuple[int, ...], dtype: str, bits: int | None, backend: str):
    x = jax.random.normal(key, size, jnp.float32)
    if bits:
        return store_tokens(x, bits, dtype)
    stale = jnp.arange(size[2])[None, None, :, None] >= lengths[:, None, None, None]
    x = jnp.where(stale, 0.0 if backend in ("xla", PEER) else jnp.nan, x).astype(dtype)
    if backend == PEER:
        return x.swapaxes(1, 2)
    return tokens_on_lanes(x) if backend == "tpu" else x


def _rope(shape: Shape) -> RopeSpec:
    return RopeSpec(500000.0, shape.head_dim)


def _attend(shape: Shape, contender: Contender, q, tokens: CachedTokens, basis):
    scale, backend = shape.head_dim**-0.5, contender.backend
    if backend == PEER:
        out = jax.nn.dot_product_attention(  # which reads tokens before heads, and is given them so
            q, tokens.keys, tokens.values, scale=scale, key_value_seq_lengths=tokens.lengths,
            implementation="cudnn" if jax.default_backend() in ("gpu", "cuda") else "xla",
        )
        return out, None
    common: dict[str, Any] = dict(
        scale=scale, q_positions=tokens.lengths[:, None], causal=False, window=None, backend=backend
    )
    if contender.op == "rotary":
        return rotary_coefficient_attention(
            q, tokens, basis, rope=_rope(shape), kv_heads=shape.kv_heads, **common
        )
    return coefficient_attention(q, tokens, **common)


def _chain(shape: Shape, contender: Contender, q, buffers):
    for tokens, basis in buffers:
        out, _ = _attend(shape, contender, q, tokens, basis)
        q = q + (0 * out[..., :1]).astype(q.dtype)  # the next call waits for this one
    return q


def _check(shape: Shape, contender: Contender, data: _Data) -> float:
    """Largest error of the outputs of the first and the last row's first and last query heads."""
    out, _ = jax.jit(functools.partial(_attend, shape, contender))(data.q, data.tokens, data.basis)
    out, worst = np.asarray(out, np.float64), 0.0
    for row, head in ((0, 0), (shape.batch - 1, shape.q_heads - 1)):
        error = np.abs(out[row, 0, head] - _float64(shape, contender, data, row, head)).max()
        worst = max(worst, float(error)) if np.isfinite(error) else math.inf
    allowed = 1e-4 if shape.dtype == "float32" else 3e-2
    if worst > allowed:
        raise ValueError(f"{contender.name} at {shape}: errs by {worst:.3g} against float64, allowed is {allowed}")
    return worst


def _float64(shape: Shape, contender: Contender, data: _Data, row: int, head: int) -> np.ndarray:
    """Output `[R]` of one query head, as the definition says."""
    kv, length = head // (shape.q_heads // shape.kv_heads), int(shape.lengths()[row])

    def read(x):
        x = x.read_block(0, shape.length) if hasattr(x, "read_block") else x
        x = x.swapaxes(1, 2) if contender.backend == PEER else x
        return np.asarray(x[row, kv, :length].astype(jnp.float32), np.float64)

    k, v = read(data.tokens.keys), read(data.tokens.values)
    if contender.op == "rotary":
        k = k @ np.asarray(data.basis, np.float64)[kv].T
        angle = np.arange(length)[:, None] * _rope(shape).inverse_frequencies()
        first, second = np.split(k, 2, axis=1)
        turned = (first + 1j * second) * np.exp(1j * angle)
        k = np.concatenate([turned.real, turned.imag], axis=1)
    logits = k @ np.asarray(data.q, np.float64)[row, 0, head] * shape.head_dim**-0.5
    weights = np.exp(logits - logits.max())
    return weights @ v / weights.sum()


def copy_bandwidth(repeats: int = 10, rounds: int = 3) -> float:
    """Bytes a second of copying an array far larger than any cache, both directions counted; the best of some rounds."""
    x = jnp.ones((1 << 30 if jax.default_backend() != "cpu" else 1 << 28) // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)  # onto itself: fresh pages would be timed with it
    x = jax.block_until_ready(copy(x))
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):  # one behind the other: a device does not wait for its host
            x = copy(x)
        jax.block_until_ready(x)
        taken.append((time.perf_counter() - begin) / repeats)
    return 2 * x.nbytes / min(taken)


def fastest_full(speeds: Sequence[Speed]) -> dict[Shape, Speed]:
    """The fastest full-rank contender of each shape."""
    best: dict[Shape, Speed] = {}
    for speed in speeds:
        if speed.contender.full(speed.shape):
            now = best.get(speed.shape)
            best[speed.shape] = speed if now is None or speed.seconds < now.seconds else now
    return best


def records(speeds: Sequence[Speed], bandwidth: float, seed: int) -> list[dict[str, Any]]:
    """One record for each contender and shape."""
    best = fastest_full(speeds)
    return [
        make_record(
            "bench kernels", method=speed.contender.name, task=speed.contender.op, length=speed.shape.length,
            samples=len(speed.all_seconds), seed=seed, shape=dataclasses.asdict(speed.shape),
            backend=speed.contender.backend, rank=speed.contender.rank, bits=speed.contender.bits,
            seconds=speed.seconds, all_seconds=speed.all_seconds, read_bytes=speed.bytes,
            bytes_per_second=speed.bytes / speed.seconds, copy_bytes_per_second=bandwidth,
            speedup=best[speed.shape].seconds / speed.seconds, fastest_full_rank=best[speed.shape].contender.name,
            error=speed.error,
        )
        for speed in speeds
    ]


def plot(speeds: Sequence[Speed], bandwidth: float, path: str) -> None:
    """Speedup over the fastest full-rank peer, and share of the copy bandwidth, against the length."""
    plt = pyplot()

    best = fastest_full(speeds)
    names = list(dict.fromkeys((s.contender.name, s.shape.batch) for s in speeds))
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
        for number, (name, batch) in enumerate(names):
            mine = sorted((s for s in speeds if (s.contender.name, s.shape.batch) == (name, batch)),
                          key=lambda s: s.shape.length)
            x = [s.shape.length for s in mine]
            label = f"{name}, B={batch}"
            style = {"marker": "osD^vP*Xh<>p"[number % 12], "color": f"C{number % 10}", "label": label}
            axes[0].plot(x, [best[s.shape].seconds / s.seconds for s in mine], **style)
            axes[1].plot(x, [100 * s.bytes / s.seconds / bandwidth for s in mine], **style)
        axes[0].set(xlabel="cached tokens", ylabel="x the fastest full-rank peer", xscale="log")
        axes[1].set(xlabel="cached tokens", ylabel="% of copy bandwidth", xscale="log")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        save_figure(figure, path, 200)
        plt.close(figure)
