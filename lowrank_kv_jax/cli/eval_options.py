"""Options and output that the benchmarks share."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def add_suite_options(parser: argparse.ArgumentParser, seed: int) -> None:
    """How questions are asked, and where the records go."""
    from lowrank_kv_jax.cli.options import add_model_options

    add_model_options(parser)
    parser.add_argument("--methods", nargs="+", metavar="SPEC",
                        help="e.g. full ojakv:rank=0.5, or `all`; by default a short list")
    parser.add_argument("--protocol", choices=("query-agnostic", "query-aware"), default="query-agnostic",
                        help="compress before the question is seen, or with it (%(default)s)")
    parser.add_argument("--prompt", choices=("base", "chat"), default="base",
                        help="the prompt as it is, or in the model's chat template (%(default)s)")
    parser.add_argument("--seed", type=int, default=seed, help="of the samples (%(default)s)")
    parser.add_argument("--rows", type=int, default=5, help="contexts that share a batch (%(default)s)")
    parser.add_argument("--cache-dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="(%(default)s)")
    parser.add_argument("--calibrate", nargs="+", metavar="TEXT",
                        help="what bases are fitted to: files, built-in names, hub datasets; by default the "
                             "first half of Python's language "
                             "reference")
    parser.add_argument("--json", metavar="FILE",
                        help="append each record as soon as it is known; with a file that holds some "
                             "already, go on there")


def suite_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The same for `evaluate_ruler` and its like."""
    import sys

    from lowrank_kv_jax.cli.options import corpus_of
    from lowrank_kv_jax.corpus import load_corpus

    return {
        "protocol": args.protocol, "style": args.prompt, "seed": args.seed, "rows": args.rows,
        "dtype": args.cache_dtype, "json": args.json, "progress": sys.stderr.isatty(),
        "calibrate": load_corpus(corpus_of(args.calibrate, "pydoc:first")),
    }


def print_scores(
    records: Sequence[Mapping[str, Any]], title: str, averages: Mapping[str, Iterable[str]] | None = None
) -> None:
    """A table of mean scores, a row for each method; averages only over groups whose tasks are all there."""
    from rich.console import Console
    from rich.table import Table

    from lowrank_kv_jax.evals.summary import mean_scores, size_text

    table = Table(title=title)
    table.add_column("method")
    scores = mean_scores(records)
    columns = list(dict.fromkeys((record["length"], record["task"]) for record in records))
    lengths = list(dict.fromkeys(length for length, _ in columns))
    groups = {
        (length, name): tuple(tasks) for name, tasks in (averages or {}).items() for length in lengths
        if all((length, task) in columns for task in tasks)
    }
    table.add_column("x smaller", justify="right")
    for length, name in [*groups, *columns]:
        table.add_column(name if len(lengths) == 1 else f"{name}\n{length}", justify="right")
    for method, cells in scores.items():
        means = [
            sum(cells[length, task] for task in tasks) / len(tasks) for (length, _), tasks in groups.items()
        ]
        row = [*means, *(cells[column] for column in columns)]
        table.add_row(method, size_text(records, method), *(f"{value:.1f}" for value in row))
    Console().print(table)
