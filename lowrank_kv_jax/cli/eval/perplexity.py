"""`lowrank-kv eval perplexity`: text through compressed caches."""

import argparse

HELP = "perplexity of any text that is scored through the cache"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_block, add_method_options

    parser = subparsers.add_parser(
        "perplexity", help=HELP,
        description="Mode stream compresses the first --step tokens of disjoint windows and scores the rest "
                    "through the "
                    "cache. Mode sliding moves windows on by --step tokens and scores what is new in each, "
                    "which with "
                    "the full cache is the usual strided perplexity.",
    )
    parser.add_argument("--text", nargs="+", metavar="TEXT",
                        help="files, built-in names or hub datasets; by default the second half of Python's "
                             "language "
                             "reference")
    parser.add_argument("--mode", choices=("stream", "sliding"), default="stream", help="(%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window (%(default)s)")
    parser.add_argument("--step", type=int, default=1024, help="see above (%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="the first so many, 0 for all (%(default)s)")
    add_block(parser)
    add_method_options(parser)
    parser.set_defaults(run=run, rows=4)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the perplexities.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods`, `load_corpus` and `evaluate_perplexity`.
    """

    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.cli.eval.options import load_on_mesh
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, corpus_of
    from lowrank_kv_jax.cli.tables import print_table
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.perplexity.run import check_step, evaluate_perplexity, mean_divergence, total_perplexity
    from lowrank_kv_jax.evals.results.summary import SIZE_HEADS, size_texts

    methods = parse_methods(args.methods)
    check_numbers(args, length=2, step=1, windows=0, rows=1, prefill_chunk=1, block=1)
    check_step(args.length, args.step)
    check_outputs(args)
    text = load_corpus(corpus_of(args.text, "pydoc:second"))
    calibrate = load_corpus(corpus_of(args.calibrate, "pydoc:first"))
    model, mesh = load_on_mesh(args)
    records = evaluate_perplexity(
        model, methods, text, args.mode, args.length, args.step, args.windows or None,
        json=args.json, mesh=mesh, rows=args.rows, dtype=args.cache_dtype, calibrate=calibrate,
        progress=True, prefill_chunk=args.prefill_chunk, block=args.block,
    )
    scored = sum(record["scored_tokens"] for record in records) // len(methods)
    lines = []
    for spec in methods:
        nats = mean_divergence(records, spec)
        numbers = f"{total_perplexity(records, spec):.3f}", "" if nats is None else f"{nats:.4f}"
        lines.append((spec, *size_texts(records, spec), *numbers))
    heads = ("method", *SIZE_HEADS, "perplexity", "divergence")
    print_table(f"Perplexity ({args.mode}) of {text.name}, {scored} tokens scored", heads, lines)
    print("divergence: of predictions from the full cache's, nats a token, where `full` is scored too")
    return 0
