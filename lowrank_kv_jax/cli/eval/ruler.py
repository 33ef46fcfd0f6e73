"""`lowrank-kv eval ruler`: retrieval, tracing, counting and reading through compressed caches."""

import argparse

HELP = "13 synthetic tasks of retrieval, tracing, counting and reading, of any length"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_block, add_suite_options

    parser = subparsers.add_parser(
        "ruler", help=HELP,
        description="RULER (Hsieh et al., 2024): samples as the official generator makes them, or from its "
                    "files.",
    )
    parser.add_argument("--tasks", nargs="+", default=["ruler-11"], metavar="TASK",
                        help="tasks, or groups of them: all, ruler-11 (without question answering), ruler-6 "
                             "(%(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N",
                        help="in tokens, the answer included (1024)")
    parser.add_argument("--samples", type=int, help="of each task and length (10, or all that --data holds)")
    parser.add_argument("--data", metavar="DIR",
                        help="score TASK.jsonl or LENGTH/TASK.jsonl files in the official format instead of "
                             "generating")
    parser.add_argument("--haystack", nargs="+", metavar="TEXT",
                        help="what needles are hidden in, where the task has essays: files, built-in names, "
                             "hub datasets; by default Python's language "
                             "reference")
    parser.add_argument("--squad", metavar="FILE", help="SQuAD's JSON for qa_1; by default from the hub")
    parser.add_argument("--hotpotqa", metavar="FILE",
                        help="HotpotQA's JSON for qa_2; by default from the hub")
    parser.add_argument("--draft", action="store_true",
                        help="let the other methods read what the full cache answers, and decode from where they differ: "
                             "the same answers but for rounding, in a fraction of the time, which is not told")
    parser.add_argument("--shapes", choices=("few", "one"), default="few",
                        help="contexts padded to a few coarse lengths, or all to the longest, which compiles least "
                             "(%(default)s)")
    add_block(parser)
    add_suite_options(parser, seed=42)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the scores.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `evaluate_ruler`.
    """
    from lowrank_kv_jax.cli.eval.options import load_on_mesh, print_scores, suite_arguments
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.ruler import GROUPS, check_seed, evaluate_ruler, expand_tasks

    methods = parse_methods(args.methods)
    tasks = expand_tasks(tuple(args.tasks))
    _check_read(args, tasks)
    check_numbers(args, lengths=1, samples=1, rows=1, prefill_chunk=1, block=1)
    check_seed(args.seed)
    check_outputs(args)
    shared = suite_arguments(args)
    model, mesh = load_on_mesh(args)
    records = evaluate_ruler(
        model, methods, tasks, args.lengths, args.samples, data=args.data, haystack=args.haystack,
        questions={name: path for name, path in (("squad", args.squad), ("hotpotqa", args.hotpotqa)) if path},
        mesh=mesh, draft=args.draft, shapes=args.shapes, block=args.block, **shared,
    )
    print_scores(records, f"RULER, {args.protocol}: score (0-100)", {"ruler-6": GROUPS["ruler-6"]})
    return 0


def _check_read(args: argparse.Namespace, tasks: tuple[str, ...]) -> None:
    """Refuse a data set that no task reads: another task was meant."""
    from lowrank_kv_jax.evals.ruler import find_task

    read = {find_task(name).parameters.get("dataset") for name in tasks}
    for option in ("squad", "hotpotqa"):
        if getattr(args, option) is not None and option not in read:
            raise ValueError(f"--{option} {getattr(args, option)}: none of the tasks {', '.join(tasks)} reads it")
