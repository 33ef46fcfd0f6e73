"""`lowrank-kv eval needle`: a needle at every depth and length."""

import argparse

HELP = "a needle at every depth of contexts of several lengths, with a heat map"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_suite_options

    parser = subparsers.add_parser("needle", help=HELP, description=HELP)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], metavar="N",
                        help="in tokens, the answer included (512 1024 2048)")
    parser.add_argument("--depths", type=int, default=5, help="evenly spaced from 0%% to 100%% (%(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="at each length and depth (%(default)s)")
    parser.add_argument("--plot", metavar="PNG", help="draw the heat maps")
    add_suite_options(parser, seed=0)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the scores by length, and draw.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `evaluate_needles`.
    """
    from lowrank_kv_jax.cli.eval.options import load_on_mesh, print_scores, suite_arguments
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs
    from lowrank_kv_jax.evals.asking.batches import check_lengths
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.needle.grid import evaluate_needles

    methods = parse_methods(args.methods)
    check_numbers(args, lengths=1, depths=2, samples=1, rows=1, seed=0, prefill_chunk=1)
    check_outputs(args)
    shared = suite_arguments(args)
    model, mesh = load_on_mesh(args)
    lengths = tuple(dict.fromkeys(args.lengths))
    check_lengths(lengths, model.config.context)
    records = evaluate_needles(
        model, methods, lengths, args.depths, args.samples, mesh=mesh, **shared
    )
    print_scores(records, f"Needles found, {args.protocol} (%)")
    if args.plot:
        from lowrank_kv_jax.evals.report.figures import draw_needles

        draw_needles(records, args.plot)
        print(f"drew {args.plot}")
    return 0
