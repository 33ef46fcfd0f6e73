"""`lowrank-kv eval leaderboard`: every method at 2x, 4x and 8x, beside kvpress."""

import argparse

HELP = "every method at 2x, 4x and 8x on ruler-6 or other tasks, beside kvpress; resumable"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.options import add_model_options

    parser = subparsers.add_parser(
        "leaderboard", help=HELP,
        description="Appends records to --json and prints the table. Interrupted, it goes on where it stopped; with "
                    "everything there, it only prints.",
    )
    add_model_options(parser)
    parser.add_argument("--json", metavar="FILE", required=True, help="the records")
    parser.add_argument("--tasks", nargs="+", default=["ruler-6"], metavar="TASK",
                        help="of RULER, or groups of them, e.g. ruler-11 (%(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], metavar="N", help="(1024 2048)")
    parser.add_argument("--samples", type=int, default=10, help="of each task and length (%(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="of the samples (%(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="SPEC",
                        help="by default all registered ones at the ratios that they reach; `none` for only the peer")
    parser.add_argument("--peer", choices=("kvpress",), help="run its presses too (needs torch and kvpress)")
    parser.add_argument("--presses", nargs="+", metavar="SPEC", help="of --peer, e.g. snapkv:4x; by default all")
    parser.add_argument("--draft", action="store_true", help="as of `eval ruler`: the same answers in less time")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there")
    parser.set_defaults(run=run)
    return parser


MADE_HERE = "<!-- lowrank-kv leaderboard -->"
"""In the file that the command writes, so that it replaces nothing else."""


def run(args: argparse.Namespace) -> int:
    """Evaluate what is missing and print the table.

    Raises:
        ValueError, OSError: as `expand_tasks`, `load_model`, `parse_methods` and `run_leaderboard`; presses
            without their peer.
    """

    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.compare.leaderboard import leaderboard_table, method_specs, peer_specs, run_leaderboard
    from lowrank_kv_jax.evals.peers.kvpress_presses import parse_press, require_kvpress
    from lowrank_kv_jax.evals.ruler import check_seed, expand_tasks
    from lowrank_kv_jax.files import check_made, write_text

    expand_tasks(args.tasks)
    if args.presses and not args.peer:
        raise ValueError("--presses: name their peer too, --peer kvpress")
    check_numbers(args, lengths=1, samples=1)
    check_seed(args.seed)
    check_outputs(args)
    if args.markdown:
        check_made(args.markdown, MADE_HERE)
    if args.methods == ["none"] and not args.peer:
        raise ValueError("--methods none: without --peer nothing is left to evaluate")
    peers = (args.presses or peer_specs()) if args.peer else []
    for spec in peers:
        parse_press(spec)
    if peers:
        require_kvpress()
    model = load_from(args)
    specs = method_specs(model.config.attention) if args.methods is None else args.methods
    methods = {} if specs == ["none"] else parse_methods(specs)
    run_leaderboard(
        model, args.model, methods, peers, args.json, args.tasks, args.lengths, args.samples,
        seed=args.seed, draft=args.draft, progress=True,
    )
    table = leaderboard_table(args.json, args.tasks, model.fingerprint, args.seed)
    print(table)
    if args.markdown:
        write_text(args.markdown, f"{MADE_HERE}\n\n{table}")
    return 0
