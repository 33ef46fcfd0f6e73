"""`lowrank-kv eval retention`: what a cache still knows after questions, turns and other text."""

import argparse

HELP = "many questions on one cache: asked anew, turn after turn, and after other text went through it"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_method_options
    from lowrank_kv_jax.evals.retention.questions import MODES

    parser = subparsers.add_parser(
        "retention", help=HELP,
        description="Contexts with several needles are compressed before a question is seen. Mode shared asks each "
                    "question of that cache anew; turns asks one after the other, with the questions and true answers "
                    "before it in the cache; distance asks after --after tokens of other text. The true answers' "
                    "likelihood is told, too.",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE",
                        help=f"{' '.join(MODES)} (all)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024], metavar="N", help="tokens of a context (1024)")
    parser.add_argument("--turns", type=int, default=5, help="questions on a context (%(default)s)")
    parser.add_argument("--after", nargs="+", type=int, default=[0, 512, 2048], metavar="N",
                        help="tokens of other text before a question, of the mode distance (0 512 2048)")
    parser.add_argument("--samples", type=int, default=4, help="contexts of each length (%(default)s)")
    parser.add_argument("--haystack", nargs="+", metavar="TEXT",
                        help="what needles are hidden in: files, built-in names, hub datasets; by default RULER's noise")
    parser.add_argument("--between", nargs="+", metavar="TEXT",
                        help="the other text; by default the second half of Python's language reference")
    add_method_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the samples (%(default)s)")
    parser.set_defaults(run=run, rows=4)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the tables.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods`, `load_corpus` and `evaluate_retention`.
    """

    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.cli.eval.options import load_on_mesh, print_scores
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, corpus_of
    from lowrank_kv_jax.cli.tables import print_table
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.retention.run import evaluate_retention, mean_nll

    methods = parse_methods(args.methods)
    check_numbers(args, lengths=1, turns=1, after=0, samples=1, rows=1, seed=0, prefill_chunk=1)
    check_outputs(args)
    texts = [None if given is None else load_corpus(corpus_of(given, "")) for given in (args.haystack, args.between)]
    calibrate = load_corpus(corpus_of(args.calibrate, "pydoc:first"))
    model, mesh = load_on_mesh(args)
    records = evaluate_retention(
        model, methods, args.lengths, args.modes, args.turns, args.after, args.samples, args.seed, haystack=texts[0],
        between=texts[1], json=args.json, rows=args.rows, dtype=args.cache_dtype, calibrate=calibrate,
        progress=True, mesh=mesh, prefill_chunk=args.prefill_chunk,
    )
    print_scores(records, f"Needles found (%), {args.samples} contexts")
    nats = mean_nll(records)
    cells = list(dict.fromkeys((record["length"], record["task"]) for record in records))
    lines = [(f"{task}, {length}", *(_shown(own[length, task]) for own in nats.values())) for length, task in cells]
    print_table("The true answers, nats a token", ("task", *nats), lines)
    return 0


def _shown(nats: float | None) -> str:
    return "" if nats is None else f"{nats:.3f}"
