"""`lowrank-kv eval lm-eval`: lm-eval's tasks through compressed caches."""

import argparse

HELP = "lm-eval's tasks: the papers' five sets from files, or any by name"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.eval.options import add_method_options

    parser = subparsers.add_parser(
        "lm-eval", help=HELP,
        description="All of a context but its last token is compressed; continuations are scored through the cache. "
                    "Contexts without examples are often so short that hybrid methods compress nothing of them: see "
                    "the printed share, and --fewshot. `lm_eval --model lowrank-kv` is the same from lm-eval's side.",
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK",
                        help="piqa arc_easy arc_challenge winogrande hellaswag, the default; without --data any of "
                             "lm-eval's")
    parser.add_argument("--data", metavar="DIR", help="a folder of TASK.jsonl files; by default from the hub")
    parser.add_argument("--samples", type=int, help="the first documents of each task; by default all")
    parser.add_argument("--fewshot", type=int, help="solved examples in front of each question (the task's own)")
    parser.add_argument("--seed", type=int, default=1234, help="of their choice (%(default)s)")
    add_method_options(parser)
    parser.set_defaults(run=run, rows=8)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the scores.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods` and `evaluate_lm_eval`.
    """
    import os

    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar is enough; tqdm reads this when it is imported
    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.cli.eval.options import load_on_mesh, print_scores
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, corpus_of
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.lm_harness.run import TASKS, evaluate_lm_eval, load_tasks, require_lm_eval

    methods = parse_methods(args.methods)
    check_numbers(args, samples=1, fewshot=0, rows=1, seed=0, prefill_chunk=1)
    require_lm_eval()
    check_outputs(args)
    calibrate = load_corpus(corpus_of(args.calibrate, "pydoc:first"))
    tasks = load_tasks(args.tasks or TASKS, args.data, args.fewshot, args.seed)
    model, mesh = load_on_mesh(args)
    records = evaluate_lm_eval(
        model, methods, tasks, args.samples, args.fewshot, args.seed, json=args.json, rows=args.rows,
        dtype=args.cache_dtype, calibrate=calibrate, progress=True, mesh=mesh, prefill_chunk=args.prefill_chunk,
    )
    print_scores(records, "lm-eval: acc_norm, acc where a task has no other (0-100)",
                 {"mean": list(dict.fromkeys(record["task"] for record in records))})
    for spec in methods:
        shares = [r["compressed_fraction"] for r in records
                  if r["method"] == spec and r.get("compressed_fraction") is not None]
        if shares:
            print(f"{spec}: {sum(shares) / len(shares):.0%} of the tokens of the caches' buffers are compressed")
    return 0
