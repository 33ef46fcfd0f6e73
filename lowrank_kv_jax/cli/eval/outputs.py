"""`lowrank-kv eval outputs`: what a cache changes inside of each layer."""

import argparse

HELP = "errors of attention outputs, layer by layer"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_methods

    parser = subparsers.add_parser(
        "outputs", help=HELP,
        description="Compresses a text and attends to it with the queries that follow, in every layer from exact inputs: "
                    "||f^ - f|| / ||f|| over queries and heads, f the output through the full cache.",
    )
    parser.add_argument("--text", nargs="+", metavar="TEXT",
                        help="files, built-in names or hub datasets; by default the second half of Python's language "
                             "reference")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window (%(default)s)")
    parser.add_argument("--queries", type=int, default=128, help="the last so many attend (%(default)s)")
    parser.add_argument("--windows", type=int, default=2, help="evenly spaced in the text (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="shifts the windows (%(default)s)")
    add_methods(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods`, `load_corpus` and `evaluate_outputs`.
    """

    import numpy as np

    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, corpus_of, load_from
    from lowrank_kv_jax.cli.tables import print_table
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.outputs.run import check_queries, evaluate_outputs
    from lowrank_kv_jax.evals.results.summary import SIZE_HEADS, size_texts

    methods = parse_methods(args.methods)
    check_numbers(args, length=2, queries=1, windows=1, seed=0)
    check_queries(args.length, args.queries)
    check_outputs(args)
    text = load_corpus(corpus_of(args.text, "pydoc:second"))
    calibrate = load_corpus(corpus_of(args.calibrate, "pydoc:first"))
    records = evaluate_outputs(
        load_from(args), methods, text, args.length, args.queries, args.windows, args.seed, json=args.json,
        dtype=args.cache_dtype, calibrate=calibrate, progress=True,
    )
    lines = []
    for spec in methods:
        by_layer = np.sqrt(np.mean([np.square(r["errors"]) for r in records if r["method"] == spec], axis=0))
        worst = int(by_layer.argmax())
        lines.append((spec, *size_texts(records, spec), f"{np.sqrt(np.mean(by_layer**2)):.4f}",
                      f"{np.median(by_layer):.4f}", f"{by_layer[worst]:.4f} (layer {worst})"))
    heads = ("method", *SIZE_HEADS, "root mean square", "median layer", "worst layer")
    print_table(f"Errors of attention outputs, {text.name}, {len(records) // len(methods)} windows", heads, lines)
    return 0
