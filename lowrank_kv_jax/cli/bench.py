"""`lowrank-kv bench`: time to first token and decode speed, side by side; attention ops, saves, serving by themselves."""

import argparse
import os
import sys

HELP = "speed: time to first token and decode tokens/s; the attention kernels; saved caches; serving"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.bench_kernels import add_compile_parser, add_kernels_parser, add_prefill_parser
    from lowrank_kv_jax.cli.bench_saves import add_saves_parser
    from lowrank_kv_jax.cli.bench_serve import add_serve_parser
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES

    parser = subparsers.add_parser("bench", help=HELP, description=HELP)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    decode = kinds.add_parser("decode", help="prefill and decode of one row, contenders alternating, medians")
    add_model_options(decode)
    decode.add_argument("--methods", nargs="+", default=["full", "ojakv:rank=0.5"], metavar="SPEC")
    decode.add_argument("--lengths", nargs="+", type=int, default=[2048], metavar="N",
                        help="prompt tokens (2048)")
    decode.add_argument("--steps", type=int, default=64, help="decode steps a round (%(default)s)")
    decode.add_argument("--rounds", type=int, default=3,
                        help="timed rounds, after one that compiles (%(default)s)")
    decode.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="float32",
                        help="of every method's cache (%(default)s); byte ratios are always against 16 bits")
    decode.add_argument("--corpus", default="pydoc", metavar="TEXT", help="the prompt's source (%(default)s)")
    decode.add_argument("--seed", type=int, default=0)
    decode.add_argument("--peer", choices=("transformers",),
                        help="time transformers on torch in the same rounds")
    decode.add_argument("--memory", action="store_true",
                        help="also what decoding needs beside the cache, as the compiler plans it: compiles once more")
    decode.add_argument("--json", metavar="FILE", help="append one JSON object for each contender and length")
    decode.set_defaults(run=run)
    add_kernels_parser(kinds)
    add_compile_parser(kinds)
    add_prefill_parser(kinds)
    add_saves_parser(kinds)
    add_serve_parser(kinds)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print the table.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `bench_decode`; the peer without torch.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.results.records import append_record
    from lowrank_kv_jax.evals.speed.bench import bench_decode, records
    from lowrank_kv_jax.progress import ProgressBar

    methods = parse_methods(args.methods)
    check_numbers(args, lengths=1, steps=1, rounds=1, seed=0)
    check_outputs(args)
    torch_model = _peer(args)
    model = load_from(args)
    total = (args.rounds + 1) * len(args.lengths) * (len(methods) + (torch_model is not None))
    with ProgressBar("bench", total, shown=True) as bar:
        speeds = bench_decode(
            model, methods, args.lengths, steps=args.steps, rounds=args.rounds, cache_dtype=args.cache_dtype,
            corpus=args.corpus, seed=args.seed, torch_model=torch_model, memory=args.memory,
            on_round=lambda length: bar.advance(),
        )
    if args.json:
        for record in records(model, speeds, seed=args.seed, cache_dtype=args.cache_dtype):
            append_record(args.json, record)
    _print(model, speeds, args)
    return 0


def _peer(args: argparse.Namespace):
    if args.peer is None:
        return None
    from lowrank_kv_jax.evals.peers.transformers_decode import load_torch_model

    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 1 and "OMP_WAIT_POLICY" not in os.environ:
        print("lowrank-kv: other programs are running: torch's OpenMP threads then spin, waiting for each "
              "other, and its times mean nothing. Wait for a quiet machine, or set OMP_WAIT_POLICY=PASSIVE",
              file=sys.stderr)
    return load_torch_model(args.model, args.dtype or "float32")


def _print(model, speeds, args: argparse.Namespace) -> None:
    """Times, and their ratios to the first contender of each length."""
    from lowrank_kv_jax.cli.options import device_line
    from lowrank_kv_jax.cli.tables import print_table

    lines = []
    for speed in speeds:
        base = next(s.timing for s in speeds if s.length == speed.length)
        timing, size = speed.timing, speed.size
        sizes = ("", "") if size is None else (f"{size.total / 2**20:.1f}", f"{size.total / size.full:.2f}")
        if args.memory:
            sizes += ("" if speed.temporaries is None else f"{speed.temporaries / 2**20:.1f}",)
        lines.append((
            str(speed.length), speed.name, f"{timing.ttft_s:.3f}", f"{timing.ttft_s / base.ttft_s:.2f}",
            f"{timing.decode_tokens_per_s:.2f}",
            f"{timing.decode_tokens_per_s / base.decode_tokens_per_s:.2f}", *sizes,
        ))
    heads = ("length", "method", "TTFT, s", "x first", "decode, tok/s", "x first", "cache, MiB", "of 16-bit")
    heads += ("temporaries, MiB",) if args.memory else ()
    print_table(f"{model.name}, one row", heads, lines, texts=("method",))
    print(f"medians of {args.rounds} alternating rounds of {args.steps} steps; {args.cache_dtype} caches; "
          f"{device_line()}")
