"""`lowrank-kv bench saves`: caches on disk, plain and compressed, beside the prefill that loading them spares."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowrank_kv_jax.evals.speed.saves import SaveSpeed


def add_saves_parser(kinds) -> argparse.ArgumentParser:
    """Declare `bench saves`."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES

    text = "saved caches: bytes on disk, seconds to save and to load, beside the prefill that loading spares"
    parser = kinds.add_parser("saves", help=text, description=text)
    add_model_options(parser)
    parser.add_argument("--methods", nargs="+", default=["full", "kivi:bits=4", "kivi:bits=2", "transform:bits=2"],
                        metavar="SPEC")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048], metavar="N", help="prompt tokens (2048)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that compiles (%(default)s)")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="bfloat16",
                        help="of every method's cache (%(default)s)")
    parser.add_argument("--corpus", default="pydoc", metavar="TEXT", help="the prompt's source (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", metavar="DIR", help="write the saves there for as long as it takes, and delete them")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each method, length and form")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print the table.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `bench_saves`.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.results.records import append_record
    from lowrank_kv_jax.evals.speed.saves import bench_saves, records
    from lowrank_kv_jax.files import expanded
    from lowrank_kv_jax.progress import ProgressBar

    methods = parse_methods(args.methods)
    check_numbers(args, lengths=1, rounds=1, seed=0)
    check_outputs(args)
    folder = None if args.folder is None else expanded(args.folder)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--folder {args.folder}: is no directory")
    model = load_from(args)
    with ProgressBar("bench", (args.rounds + 1) * len(args.lengths) * len(methods), shown=True) as bar:
        speeds = bench_saves(
            model, methods, args.lengths, rounds=args.rounds, cache_dtype=args.cache_dtype, corpus=args.corpus,
            seed=args.seed, folder=folder, on_round=lambda length: bar.advance(),
        )
    if args.json:
        for record in records(model, speeds, seed=args.seed, cache_dtype=args.cache_dtype):
            append_record(args.json, record)
    _print(model, speeds, args)
    return 0


def _print(model: Any, speeds: "Sequence[SaveSpeed]", args: argparse.Namespace) -> None:
    from lowrank_kv_jax.cli.options import device_line
    from lowrank_kv_jax.cli.tables import print_table

    lines = []
    for speed in speeds:
        prefill, save, load = speed.medians.values()
        lines.append((
            str(speed.length), speed.name, speed.form, f"{speed.size.total / 2**20:.2f}", f"{speed.disk / 2**20:.2f}",
            f"{speed.disk / speed.size.total:.3f}", f"{save:.2f}", f"{load:.2f}", f"{prefill:.2f}",
            f"{prefill / load:.1f}",
        ))
    heads = ("length", "method", "saved", "cache, MiB", "disk, MiB", "of cache", "save, s", "load, s", "prefill, s",
             "prefill / load")
    print_table(f"{model.name}, one row", heads, lines, texts=("method", "saved"))
    print(f"medians of {args.rounds} alternating rounds; {args.cache_dtype} caches, without the bases that requests "
          f"share; {device_line()}")
