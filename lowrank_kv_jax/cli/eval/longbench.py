"""`lowrank-kv eval longbench`: 16 English tasks through compressed caches."""

import argparse

HELP = "16 English tasks: question answering, summaries, few-shot learning, retrieval, code"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_suite_options

    parser = subparsers.add_parser(
        "longbench", help=HELP,
        description="LongBench (Bai et al., 2024) with its own prompts, truncation and metrics. With "
                    "--prompt chat the few-shot and code tasks keep the base prompt, as "
                    "published.",
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="by default all 16")
    parser.add_argument("--samples", type=int, help="the first of each task; by default all")
    parser.add_argument("--data", metavar="DIR",
                        help="a folder of TASK.jsonl files, or a hub dataset with a configuration for each "
                             "task; by default LongBench on the "
                             "hub")
    parser.add_argument("--max-length", type=int, metavar="N",
                        help="tokens that longer prompts are cut to, out of the middle (the model's context "
                             "less 640)")
    add_suite_options(parser, seed=0)
    parser.set_defaults(run=run, rows=2)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the scores.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `evaluate_longbench`.
    """
    from lowrank_kv_jax.cli.eval.options import load_on_mesh, print_scores, suite_arguments
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.longbench import all_tasks, evaluate_longbench, find_task

    methods = parse_methods(args.methods)
    tasks = list(dict.fromkeys(find_task(name).name for name in args.tasks or all_tasks()))
    check_numbers(args, samples=1, max_length=2, rows=1, seed=0, prefill_chunk=1)
    check_outputs(args)
    shared = suite_arguments(args)
    model, mesh = load_on_mesh(args)
    records = evaluate_longbench(
        model, methods, tasks, args.samples, data=args.data, max_length=args.max_length,
        mesh=mesh, **shared
    )
    print_scores(records, f"LongBench, {args.protocol}: score (0-100)",
                 {"mean": tasks} if len(tasks) > 1 else None)
    return 0
