"""`lowrank-kv bench kernels` and `bench compile`: the attention ops by themselves."""

import argparse

from lowrank_kv_jax.cli.bench_sweep import run_sweep
from lowrank_kv_jax.cli.tables import print_table

TEXTS = ("attention", "kernel", "instructions", "grid")
"""Columns that hold no numbers."""


def add_kernels_parser(kinds) -> argparse.ArgumentParser:
    """Declare `bench kernels`."""
    text = "decode attention alone: checked against float64, then timed over buffers that no cache holds"
    parser = kinds.add_parser("kernels", help=text, description=text)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096], metavar="S", help="cached tokens (4096)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], metavar="B", help="rows (1)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[32, 64], metavar="R", help="(32 64)")
    parser.add_argument("--ops", nargs="+", choices=("coefficients", "int8", "rotary"), default=["coefficients"])
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(%(default)s)")
    parser.add_argument("--ragged", action="store_true", help="rows of half the length up to all of it")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds, alternating (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each contender and shape")
    parser.add_argument("--plot", metavar="FILE", help="draw speedups and bandwidths")
    parser.add_argument("--sweep", action="store_true",
                        help="instead, on a GPU: the kernels with other stages, warps, tiles and waves than they choose, "
                             "and prompts and decode steps of Llama 3.1 8B with random weights, within nine minutes")
    parser.add_argument("--parts", nargs="+", choices=("kernels", "steps"), default=["kernels", "steps"],
                        help="of --sweep (both)")
    parser.add_argument("--results", metavar="DIR", default="benchmarks/results",
                        help="where --sweep writes its JSON (%(default)s)")
    parser.set_defaults(run=run_kernels)
    return parser


def run_kernels(args: argparse.Namespace) -> int:
    """Measure and print the table.

    Raises:
        ValueError, OSError: sizes that do not fit together, a wrong result, a file that cannot be written.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs
    from lowrank_kv_jax.evals.results.records import append_record
    from lowrank_kv_jax.evals.speed import kernels

    if args.sweep:
        return run_sweep(args)
    counts = ("lengths", "batch", "ranks", "repeats", "q_heads", "kv_heads", "head_dim")
    check_numbers(args, **dict.fromkeys(counts, 1), seed=0)
    if args.q_heads % args.kv_heads:
        raise ValueError(f"--q-heads {args.q_heads}: must be a multiple of --kv-heads {args.kv_heads}")
    check_outputs(args)
    bandwidth = kernels.copy_bandwidth()
    speeds = []
    for batch in args.batch:
        for length in args.lengths:
            shape = kernels.Shape(
                batch, length, args.q_heads, args.kv_heads, args.head_dim, args.dtype, args.ragged
            )
            speeds += kernels.bench(shape, args.ranks, args.ops, repeats=args.repeats, seed=args.seed)
    _print_speeds(speeds, bandwidth, args.repeats)
    if args.json:
        for record in kernels.records(speeds, bandwidth, args.seed):
            append_record(args.json, record)
    if args.plot:
        kernels.plot(speeds, bandwidth, args.plot)
    return 0


def _print_speeds(speeds, bandwidth: float, repeats: int) -> None:
    from lowrank_kv_jax.cli.options import device_line
    from lowrank_kv_jax.evals.speed.kernels import fastest_full

    best = fastest_full(speeds)
    rows = []
    for speed in speeds:
        rate = speed.bytes / speed.seconds
        rows.append((
            str(speed.shape.batch), str(speed.shape.length), speed.contender.name, f"{1e6 * speed.seconds:.1f}",
            f"{rate / 1e9:.1f}", f"{100 * rate / bandwidth:.0f}", f"{best[speed.shape].seconds / speed.seconds:.2f}",
            f"{speed.error:.0e}",
        ))
    heads = ("B", "tokens", "attention", "us", "GB/s", "% of copy", "x full rank", "error")
    first = speeds[0].shape
    print_table(f"{first.q_heads}/{first.kv_heads} heads of {first.head_dim}, {first.dtype}", heads, rows, texts=TEXTS)
    print(f"medians of {repeats} alternating rounds; bytes are those of valid coefficients; copying runs at "
          f"{bandwidth / 1e9:.1f} GB/s; ratios to the fastest full-rank peer; {device_line()}")


def add_compile_parser(kinds) -> argparse.ArgumentParser:
    """Declare `bench compile`."""
    text = "compile the kernels for hardware that is not there, and say what the compilers say of them"
    parser = kinds.add_parser("compile", help=text, description=text)
    parser.add_argument("--targets", nargs="+", choices=("sm_90", "v5e", "v6e"), default=["sm_90", "v5e", "v6e"])
    parser.add_argument("--whole", action="store_true",
                        help="instead of the kernels, the prefill of one layer of Llama 3.1 8B at 32K tokens, on "
                             "one device and over four, and that of a chunk behind them; "
                             "with --methods also what that asks for, in one table")
    parser.add_argument("--methods", nargs="+", metavar="SPEC",
                        help="instead of the kernels, decode steps of one such layer through these caches, on one "
                             "device, with heads and with slots over four, and their refresh; or `all`")
    parser.add_argument("--layers", nargs="+", type=int, metavar="N",
                        help="instead of one layer's, the decode step of the whole model cut to so many layers, and "
                             "the first of these over four devices")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each program and target")
    parser.set_defaults(run=run_compile)
    return parser


def add_prefill_parser(kinds) -> argparse.ArgumentParser:
    """Declare `bench prefill`."""
    text = "memory of a prefill in chunks at the shape of Llama 3.1 8B, by this machine's compiler, without weights"
    parser = kinds.add_parser("prefill", help=text, description=text)
    parser.add_argument("--methods", nargs="+", default=["full", "kivi:bits=4", "snapkv:budget=4096"], metavar="SPEC",
                        help="without calibrated bases (%(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072], metavar="N",
                        help="tokens of the prompt (32768 131072)")
    parser.add_argument("--prefill-chunk", type=int, default=2048, metavar="N", help="(%(default)s)")
    parser.add_argument("--whole", action="store_true", help="compile the prefill of whole prompts too")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each method and length")
    parser.set_defaults(run=run_prefill)
    return parser


def run_prefill(args: argparse.Namespace) -> int:
    """Compile and print a table.

    Raises:
        ValueError: as `parse_methods` and `chunk_memories`.
    """
    from lowrank_kv_jax.cli.options import append_records, check_numbers, check_outputs
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.speed.compile_chunk import chunk_memories

    methods = parse_methods(args.methods)
    check_numbers(args, lengths=1, prefill_chunk=1)
    check_outputs(args)
    rows = []
    for spec, tokens, found in chunk_memories(methods, args.lengths, args.prefill_chunk, whole=args.whole):
        sizes = (found.cache, found.chunk, found.whole)
        rows.append((str(tokens), spec, *("" if size is None else f"{size / 2**20:.1f}" for size in sizes)))
        append_records(args, "bench prefill", [{"spec": spec, **found._asdict()}], length=tokens,
                       prefill_chunk=args.prefill_chunk)
    heads = ("tokens", "method", "cache, MiB", "chunk, MiB", "whole, MiB")
    print_table(f"Llama 3.1 8B, one row, bfloat16, {args.prefill_chunk} tokens at a time", heads, rows, texts=2)
    print("cache: of all layers; chunk: what is needed beside weights and cache; whole: the same where the prompt is "
          "read as one")
    return 0


def run_compile(args: argparse.Namespace) -> int:
    """Compile the grid of programs, or whole ones, and print a table a target; 1 if one of them fails.

    Raises:
        ValueError: no target's compiler can be had, or as `parse_methods`.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.results.records import append_record, make_record
    from lowrank_kv_jax.evals.speed.compile_model import compile_models
    from lowrank_kv_jax.evals.speed.compile_whole import compile_steps, compile_whole
    from lowrank_kv_jax.pallas_kernels.compile_grid import compile_all

    check_outputs(args)
    check_numbers(args, layers=1)
    asked = [(compile_whole, (args.targets,))] if args.whole else []
    if args.layers:
        asked.append((compile_models, (args.targets, parse_methods(args.methods or ["full"]), args.layers)))
    elif args.methods:
        asked.append((compile_steps, (args.targets, parse_methods(args.methods))))
    results, missing = [], {}
    for compile_them, given in asked or [(compile_all, (args.targets,))]:
        found, without = compile_them(*given)
        results, missing = results + found, missing | without
    for target in args.targets:
        own = [result for result in results if result.target == target]
        if own and asked:
            _print_programs(target, own)
        elif own:
            print_table(target, own[0].heads(), [result.row() for result in own], texts=TEXTS)
    for target, reason in missing.items():
        print(f"{target}: not compiled: {reason}")
    if args.json:
        for result in results:
            append_record(args.json, make_record("bench compile", task=result.name, **result.record()))
    if not results:
        raise ValueError("; ".join(missing.values()))
    return int(any(result.failure for result in results))


def _print_programs(target: str, results) -> None:
    """Whole programs, a line each; what is known of a GPU's code alone stays empty for others."""
    rows = []
    for result in results:
        if result.failure:
            rows.append((result.name, *[""] * 11, f"FAILED: {result.failure[:60]}"))
            continue
        f = result.facts
        notes = " ".join(dict.fromkeys([*(text.split(":")[0] for text in f["said"]), *f["libraries"]]))
        rows.append((result.name, f"{f['temporaries'] / 2**20:.1f}", f"{f['moved']}", f"{f['collective']}",
                     str(f["loops"]), str(f["kernels"]), *_attention_columns(f), f"{f['seconds']:.1f}", notes))
    heads = ("program", "temporaries, MiB", "moved", "exchanged", "loops", "kernels", "spilled, B", "shared, KiB",
             "copies, B", "waits", "in flight, KiB", "CPU-s", "notes")
    print_table(f"{target}: programs of Llama 3.1 8B", heads, rows, texts=("program", "notes"))
    print("moved: elements of the largest array of tokens that is copied as a whole; exchanged: of the largest that "
          "devices exchange; kernels: what the device is given to run, one after the other; spilled to in flight: of the "
          "attention kernels, the most bytes spilled and of shared memory, the widths of asynchronous copies, the fewest "
          "groups of them and bytes under way while a program waits")


def _attention_columns(facts) -> tuple[str, ...]:
    if not facts.get("attention_kernels"):
        return ("",) * 5
    widths = " ".join(map(str, facts["widths"]))
    return (str(facts["spilled"]), f"{facts['shared'] / 1024:.0f}", widths, str(facts["waits"]),
            f"{facts['in_flight'] / 1024:.0f}")
