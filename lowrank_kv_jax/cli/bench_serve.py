"""`lowrank-kv bench serve`: a stream of requests under one budget of bytes, method by method."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowrank_kv_jax.evals.speed.serve import Served

METHODS = (
    "full", "kivi:bits=4", "kvzip:keep=0.25", "transform:smaller=8,sampled=False", "kivi:bits=4+kvzip:keep=0.25",
    "transform:smaller=8,sampled=False+kvzip:keep=0.5",
)


def add_serve_parser(kinds) -> argparse.ArgumentParser:
    """Declare `bench serve`."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES

    text = "continuous batching under one budget of bytes: requests in flight, tokens/s, time to first token, answers"
    parser = kinds.add_parser("serve", help=text, description=text)
    add_model_options(parser)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="SPEC", help="the first is compared with")
    parser.add_argument("--memory", default="256MiB", metavar="BYTES",
                        help="of all caches and bases of a method (%(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096], metavar="N",
                        help="tokens of a context, drawn between the least and the largest (1024 4096)")
    parser.add_argument("--new-tokens", type=int, default=32, help="of every answer (%(default)s)")
    parser.add_argument("--asked", type=int, default=4,
                        help="requests that share a context, of half of all; 1 for none (%(default)s)")
    parser.add_argument("--prefixes", type=int, default=2,
                        help="contexts that are kept for others, at most one of four rows (%(default)s)")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="bfloat16", help="(%(default)s)")
    parser.add_argument("--corpus", default="pydoc", metavar="TEXT", help="that bases are calibrated on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each method")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print the table.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `bench_serve`.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.results.records import append_record
    from lowrank_kv_jax.evals.speed.serve import bench_serve, records
    from lowrank_kv_jax.progress import ProgressBar
    from lowrank_kv_jax.serving.plan import parse_bytes

    methods, memory = parse_methods(args.methods), parse_bytes("--memory", args.memory)
    check_numbers(args, requests=1, lengths=1, new_tokens=1, asked=1, prefixes=0, seed=0)
    check_outputs(args)
    model = load_from(args)
    given = {"lengths": (min(args.lengths), max(args.lengths)), "asked": args.asked, "new_tokens": args.new_tokens,
             "seed": args.seed, "cache_dtype": args.cache_dtype}
    with ProgressBar("bench", args.requests * len(methods), shown=True) as bar:
        served = bench_serve(
            model, methods, memory, requests=args.requests, prefixes=args.prefixes, corpus=args.corpus,
            on_answer=lambda spec: bar.advance(), **given,
        )
    if args.json:
        for record in records(model, served, memory=memory, **given):
            append_record(args.json, record)
    _print(model, served, args)
    return 0


def _print(model: Any, served: "Sequence[Served]", args: argparse.Namespace) -> None:
    """Figures, and their ratios to the first method."""
    from lowrank_kv_jax.cli.options import device_line
    from lowrank_kv_jax.cli.tables import print_table

    first, lines = served[0], []
    for one in served:
        median, late = one.ttft_s
        lines.append((
            one.name, str(one.slots), str(one.most_in_flight), f"{one.in_flight:.1f}",
            f"{one.most_in_flight / first.most_in_flight:.1f}", f"{one.score:.0f}", f"{one.tokens_per_s:.2f}",
            f"{one.tokens_per_s / first.tokens_per_s:.2f}", f"{median:.1f}", f"{late:.1f}", f"{one.bytes / 2**20:.1f}",
        ))
    heads = ("method", "rows", "in flight", "on average", "x first", "answers, %", "tokens/s", "x first",
             "first token, s", "95%", "MiB")
    print_table(f"{model.name}, {args.requests} requests within {args.memory}", heads, lines)
    print(f"contexts of {min(args.lengths)} to {max(args.lengths)} tokens, half of the requests share one with "
          f"{args.asked - 1} others; all asked at once, answers of {args.new_tokens} tokens; {args.cache_dtype} caches; "
          f"{device_line()}")
