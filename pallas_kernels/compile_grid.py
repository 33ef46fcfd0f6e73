"""The programs that are compiled for each target: ops, ranks, storages and shapes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels.coefficient_attention import by_kernel
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler, compile_for, device, gpu_facts, mosaic_facts
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.lanes import tokens_on_lanes
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import Tile, store_tokens
from lowrank_kv_jax.storage.water_filled import WidthRuns, empty_water_filled, in_words

HEADS, KV_HEADS = 32, 8


@dataclasses.dataclass(frozen=True)
class Program:
    """One op at one shape; `joint` has one basis and one set of coefficients for all heads, `dtype="mixed"` packed ones
    of several widths, keys before RoPE around a mean, `"tiles2"` 2 bits with scales as KIVI has them, `chosen` tokens at
    positions in no order, those of each stored head its own, `turned` keys by their place in a tile."""

    op: str
    rank_k: int
    rank_v: int
    batch: int = 8
    size: int = 32768
    head_dim: int = 128
    dtype: str = "bfloat16"
    joint: bool = False
    queries: int = 1
    mosaic: bool = False  # on a GPU the kernel in the Mosaic dialect instead of Triton's
    chosen: bool = False
    turned: bool = False

    def __str__(self) -> str:
        op = {"coefficient_attention": "coefficients", "rotary_coefficient_attention": "pre-RoPE"}[self.op]
        op, heads = ("Mosaic " if self.mosaic else "") + op, ", joint" if self.joint else ""
        heads += ", chosen" if self.chosen else ", turned" if self.turned else ""
        return (f"{op} {self.rank_k}/{self.rank_v}{heads}, D={self.head_dim}, {self.dtype}, B={self.batch}, "
                f"S={self.size}, T={self.queries}")


PLAIN, ROTARY = "coefficient_attention", "rotary_coefficient_attention"
PROGRAMS = (
    *(Program(PLAIN, r, r) for r in (16, 32, 48, 64, 96, 128)),
    Program(PLAIN, 64, 96), Program(PLAIN, 32, 32, batch=1), Program(PLAIN, 128, 128, size=131072),
    Program(PLAIN, 256, 256, head_dim=256), Program(PLAIN, 64, 64, dtype="float32", size=1000),
    Program(PLAIN, 64, 64, queries=4), Program(PLAIN, 32, 32, dtype="int8"), Program(PLAIN, 64, 64, dtype="int8"),
    Program(PLAIN, 128, 96, dtype="int8", size=1000),
    Program(PLAIN, 512, 512, joint=True),
    *(Program(ROTARY, r, r) for r in (16, 32, 64, 96, 128)),
    Program(ROTARY, 48, 32, head_dim=64), Program(ROTARY, 48, 96, head_dim=96), Program(ROTARY, 64, 64, head_dim=256),
    Program(ROTARY, 64, 64, dtype="int8"),
    *(Program(ROTARY, *ranks, joint=True) for ranks in ((512, 512), (256, 384), (256, 256))),
    *(Program(PLAIN, 128, 128, dtype=f"tiles{bits}") for bits in (2, 4)),
    *(Program(PLAIN, r, r, dtype="mixed") for r in (64, 128)),
    Program(PLAIN, 160, 152, dtype="mixed", joint=True, head_dim=64),
    *(Program(PLAIN, r, r, dtype="mixed", joint=True) for r in (512, 640, 1024)),
    *(Program(ROTARY, r, r, dtype="mixed") for r in (64, 128)),
    Program(ROTARY, 160, 152, dtype="mixed", joint=True, head_dim=64),
    *(Program(ROTARY, r, r, dtype="mixed", joint=True) for r in (256, 512, 1024)),
    Program(ROTARY, 128, 128, dtype="mixed", queries=4), Program(ROTARY, 512, 512, joint=True, chosen=True),
    *(Program(ROTARY, r, r, dtype="mixed", turned=True) for r in (64, 128)),
    Program(ROTARY, 160, 152, dtype="mixed", joint=True, head_dim=64, turned=True),
    *(Program(ROTARY, r, r, dtype="mixed", joint=True, turned=True) for r in (512, 1024)),
    *(Program(ROTARY, r, r, chosen=True) for r in (32, 64, 128)), Program(ROTARY, 64, 64, dtype="int8", chosen=True),
    Program(ROTARY, 64, 64, head_dim=256, chosen=True), Program(ROTARY, 48, 32, head_dim=64, chosen=True),
    Program(ROTARY, 256, 384, joint=True, chosen=True), Program(ROTARY, 64, 64, dtype="mixed", chosen=True),
    *(Program(ROTARY, r, r, dtype="mixed", joint=True, chosen=True) for r in (256, 512)),
    *(Program(PLAIN, r, r, mosaic=True) for r in (16, 32, 48, 64, 96, 128)), Program(PLAIN, 64, 96, mosaic=True),
    Program(PLAIN, 256, 192, head_dim=256, mosaic=True), Program(PLAIN, 64, 64, dtype="float16", size=1000, mosaic=True),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one program: facts of the compiler, or why it failed."""

    name: str
    target: str
    facts: dict[str, Any]
    failure: str | None = None

    @staticmethod
    def heads() -> tuple[str, ...]:
        return ("kernel", "registers", "spilled, B", "shared, KiB", "grid", "threads", "waits", "in flight, KiB",
                "temporaries, KiB", "instructions")

    def row(self) -> tuple[str, ...]:
        if self.failure:
            return self.name, *[""] * 8, f"FAILED: {self.failure[:60]}"
        f = self.facts
        shared = f"{f['shared'] / 1024:.0f}" if "shared" in f else ""
        kinds = " ".join(f"{kind}:{n}" for kind, n in f.get("instructions", {}).items())
        under_way = f"{f['in_flight'] / 1024:.0f}" if "in_flight" in f else ""
        return (self.name, str(f.get("registers", "")), str(f.get("spilled", "")), shared, f.get("grid", ""),
                str(f.get("threads", "")), str(f.get("waits", "")), under_way,
                f"{f['temporaries'] / 1024:.0f}" if "temporaries" in f else "", kinds)

    def record(self) -> dict[str, Any]:
        return {"target": self.target, "failure": self.failure, **self.facts}


def tried(name: str, target: str, facts: Callable[[], dict[str, Any]]) -> Result:
    """The facts that a compiler gives, or why it fails.

    Raises:
        NoCompiler: there is none.
    """
    try:
        return Result(name, target, facts())
    except NoCompiler:
        raise
    except Exception as error:  # a compiler raises what it likes
        return Result(name, target, {}, " ".join(str(error).split())[:400] or type(error).__name__)


def supported(program: Program, target: str) -> bool:
    """Whether the target's kernels claim the case: Mosaic GPU only on GPUs, from jax 0.12 on."""
    return not program.mosaic or target == "sm_90" and jax.version.__version_info__ >= (0, 12)


def compile_all(targets: Sequence[str], programs: Sequence[Program] = PROGRAMS) -> tuple[list[Result], dict[str, str]]:
    """Every program for every target whose compiler is there; and the others' reasons."""
    results, missing = [], {}
    for target in targets:
        try:
            device(target)
        except NoCompiler as reason:
            missing[target] = str(reason)
            continue
        for program in programs:
            if supported(program, target):
                results.append(_compile(program, target))
    return results, missing


def _compile(program: Program, target: str) -> Result:
    f, args = arguments(program, target)

    def facts() -> dict[str, Any]:
        if target == "sm_90":
            kernel = PLAIN if program.turned else program.op
            found = (mosaic_facts if program.mosaic else gpu_facts)(kernel, f, *args)
            return found._asdict() | {"copies": {str(width): n for width, n in sorted(found.copies.items())}}
        return {"temporaries": compile_for(target, f, *args).memory_analysis().temp_size_in_bytes}

    return tried(str(program), target, facts)


def arguments(program: Program, target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The op's kernel for a target, and the shapes it is compiled for."""
    import importlib

    gpu = "gpu_mosaic" if program.mosaic else "gpu_triton"
    module = importlib.import_module(f"lowrank_kv_jax.pallas_kernels.{program.op}.{gpu if target == 'sm_90' else 'tpu'}")
    shape = jax.ShapeDtypeStruct
    floats = program.dtype in ("float32", "bfloat16", "float16")
    compute = jnp.dtype(program.dtype if floats else "bfloat16")
    stored, heads = 1 if program.joint else KV_HEADS, KV_HEADS

    def side(rank, tile):
        full = (program.batch, stored, program.size, rank)
        if program.dtype == "int8":
            held = jax.eval_shape(lambda x: store_tokens(x, 8, compute), shape(full, jnp.float32))
        elif program.dtype.startswith("tiles"):
            bits = int(program.dtype.removeprefix("tiles"))
            held = jax.eval_shape(lambda x: store_tokens(x, bits, compute, tile), shape(full, jnp.float32))
        elif program.dtype == "mixed":
            held = jax.eval_shape(lambda: empty_water_filled(*full[:3], mixed_runs(rank)))
        else:
            held = shape(full, compute)
        return held if target == "sm_90" else jax.eval_shape(tokens_on_lanes, held)

    gaps = shape((program.batch, 2), jnp.int32)
    rows = shape((program.batch,), jnp.int32)
    sides = side(program.rank_k, Tile(32, 1)), side(program.rank_v, Tile(1, 32))
    each = shape((program.batch, stored, program.size), jnp.int32)
    where = PerHead(each, None, heads) if program.chosen else Runs(gaps, gaps)
    tokens = CachedTokens(*sides, rows, where)
    positions = shape((program.batch, program.queries), jnp.int32)
    common = dict(scale=program.head_dim**-0.5, causal=False, window=None)
    if program.op == PLAIN:
        q = shape((program.batch, program.queries, HEADS, program.rank_k), compute)

        def plain(q, tokens, positions):
            return by_kernel.coefficient_attention(module, q, tokens, q_positions=positions, **common)

        return plain, (q, tokens, positions)
    q = shape((program.batch, program.queries, HEADS, program.head_dim), compute)
    basis = shape((stored, heads // stored * program.head_dim, program.rank_k), compute)
    rotary = functools.partial(
        module.rotary_coefficient_attention, rope=RopeSpec(500000.0, program.head_dim), kv_heads=heads, value_basis=None,
        **common, **({"origin": 4} if program.turned else {}),
    )

    mean = shape((program.batch, heads, program.head_dim), jnp.float32) if program.dtype == "mixed" else None

    def pre_rope(q, tokens, positions, basis, mean):
        return rotary(q, tokens, basis, q_positions=positions, key_mean=mean)

    return pre_rope, (q, tokens, positions, basis, mean)


def mixed_runs(rank: int) -> WidthRuns:
    """So many components in about 2.3 bits: some in 8, a quarter in 4, more in 2, and the rest in 1; whole words."""
    counts = {8: rank // 32, 4: rank // 8 * 2, 2: rank * 3 // 32 * 4}
    counts[1] = rank - sum(counts.values())
    return in_words(tuple((bits, count) for bits, count in counts.items() if count), rank)
