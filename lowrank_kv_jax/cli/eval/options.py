"""Options and output that the benchmarks share."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowrank_kv_jax.cli.tables import print_table


def add_suite_options(parser: argparse.ArgumentParser, seed: int) -> None:
    """How questions are asked, and where the records go."""
    add_method_options(parser)
    parser.add_argument("--protocol", choices=("query-agnostic", "query-aware"), default="query-agnostic",
                        help="compress before the question is seen, or with it (%(default)s)")
    parser.add_argument("--prompt", choices=("base", "chat"), default="base",
                        help="the prompt as it is, or in the model's chat template (%(default)s)")
    parser.add_argument("--seed", type=int, default=seed, help="of the samples (%(default)s)")


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Model and methods, how they are run, and where the records go."""
    add_methods(parser)
    parser.add_argument("--rows", type=int, default=5, help="contexts that share a batch (%(default)s)")
    parser.add_argument("--prefill-chunk", type=int, metavar="N",
                        help="read contexts N tokens at a time and compress between them; by default as a whole")
    parser.add_argument("--mesh", metavar="AXES",
                        help="lay the model and the caches out over devices, e.g. data=2,model=4: contexts of a batch "
                             "over data, heads over model")


def add_block(parser: argparse.ArgumentParser) -> None:
    """How often caches are refreshed."""
    parser.add_argument("--block", type=int, metavar="N",
                        help="tokens that the caches of all methods hold exactly between two refreshes; fewer leave the "
                             "codes of small caches more bytes; by default as many as each method asks for (32, "
                             "transform 16)")


def add_methods(parser: argparse.ArgumentParser) -> None:
    """Model and methods, and where the records go."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES, default_cache_dtype

    add_model_options(parser)
    parser.add_argument("--methods", nargs="+", metavar="SPEC",
                        help="e.g. full ojakv:rank=0.5, or `all`; by default a short list")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default=default_cache_dtype(),
                        help="(%(default)s)")
    parser.add_argument("--calibrate", nargs="+", metavar="TEXT",
                        help="what bases are fitted to: files, built-in names, hub datasets; by default the "
                             "first half of Python's language reference")
    parser.add_argument("--json", metavar="FILE",
                        help="append each record as soon as it is known; with a file that holds some "
                             "already, go on there")


def load_on_mesh(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model that the options name and its mesh, None for one device.

    Raises:
        ValueError: as `make_mesh`, or a mesh that does not fit the model or the rows of a batch.
    """
    from lowrank_kv_jax.cli.options import load_from

    if args.mesh is None:
        return load_from(args), None
    from lowrank_kv_jax.storage.sharding import check_mesh, make_mesh

    mesh = make_mesh(args.mesh)
    model = load_from(args, mesh)
    return model, check_mesh(mesh, model.config.attention, args.rows)


def suite_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The same for `evaluate_ruler` and its like."""

    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.cli.options import corpus_of

    return {
        "protocol": args.protocol, "style": args.prompt, "seed": args.seed, "rows": args.rows,
        "dtype": args.cache_dtype, "prefill_chunk": args.prefill_chunk, "json": args.json,
        "progress": True, "calibrate": load_corpus(corpus_of(args.calibrate, "pydoc:first")),
    }


def print_scores(
    records: Sequence[Mapping[str, Any]], title: str, averages: Mapping[str, Iterable[str]] | None = None
) -> None:
    """A table of mean scores, a column for each method; averages only over groups whose tasks are all there."""
    from lowrank_kv_jax.evals.results.summary import SIZE_HEADS, mean_scores, size_texts

    scores = mean_scores(records)
    cells = list(dict.fromkeys((record["length"], record["task"]) for record in records))
    several = len({length for length, _ in cells}) > 1
    sizes = zip(SIZE_HEADS, *(size_texts(records, method) for method in scores), strict=True)
    lines: list[tuple[str, ...] | None] = list(sizes)
    for length in dict.fromkeys(length for length, _ in cells):
        here = {task: [(length, task)] for cell, task in cells if cell == length}
        for name, tasks in (averages or {}).items():
            group = [(length, task) for task in tasks]
            if set(group) <= set(cells):
                here = {name: group} | here
        lines.append(None)
        for name, group in here.items():
            means = (sum(own[cell] for cell in group) / len(group) for own in scores.values())
            lines.append((f"{name}, {length}" if several else name, *(f"{mean:.1f}" for mean in means)))
    print_table(title, ("task", *scores), lines)
