"""`lowrank-kv eviction`: what eviction costs, and what the moments of the evicted recover."""

import argparse

HELP = "what eviction costs inside of layers and in scores, and what moments recover"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "eviction", help=HELP,
        description="error: ||f - f_R|| / ||f|| in each layer, and corrected by moments. ablation: MomentKV without and "
                    "with its parts. bytes: rules at equal bytes, statistics counted. ojakv: table 6 of OjaKV.",
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, directory, .gguf file or hub id (%(default)s)")
    parser.add_argument("--studies", nargs="+", choices=("error", "ablation", "bytes", "ojakv"), default=["error"],
                        help="(error)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--budgets", nargs="+", type=int, default=[64, 128, 256, 512], metavar="N",
                        help="tokens a kv head keeps (64 128 256 512)")
    parser.add_argument("--windows", type=int, default=4, help="texts for the perplexity (%(default)s)")
    parser.add_argument("--depths", type=int, default=4, help="of needles (%(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="needles at each depth, 0 for none (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and needles (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append records; a file that holds some is gone on with")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_model` and the evaluations.
    """
    import sys

    from lowrank_kv_jax.evals import eviction
    from lowrank_kv_jax.evals.records import check_writable
    from lowrank_kv_jax.models.load import load_model

    if args.json:
        check_writable(args.json)
    settings = eviction.Settings(args.length, tuple(args.budgets), args.windows, depths=args.depths,
                                 samples=args.samples, seed=args.seed)
    model = load_model(args.model)
    for study in args.studies:
        if study == "error":
            _print_errors(args, model, settings)
            continue
        specs = eviction.study_specs(model, study, settings)
        rows = eviction.scores(model, specs, settings, json=args.json, progress=sys.stderr.isatty())
        _print_scores(study, rows)
    return 0


def _print_errors(args, model, settings) -> None:
    import dataclasses

    from lowrank_kv_jax.evals import eviction
    from lowrank_kv_jax.evals.records import append_record, make_record

    rows = eviction.error_table(model, settings)
    means = eviction.means(rows)
    columns = ("mass", "angle", "error", "corrected_0", "corrected_1", "corrected_gaussian", "cosine_0", "cosine_1",
               "partition_1", "partition_gaussian")
    _table("Eviction, means over layers", ("method", *columns),
           [(spec, *(f"{own[c]:.3f}" for c in columns)) for spec, own in means.items()])
    least = min(settings.budgets)
    layers = [row for row in rows if f"budget={least}" in row.spec]
    _table(f"Eviction by layer at a budget of {least}",
           ("method", "layer", "mass", "error", "corrected_1", "cosine_1"),
           [(r.spec, str(r.layer), f"{r.mass:.3f}", f"{r.error:.3f}", f"{r.corrected['1']:.3f}", f"{r.cosine['1']:.3f}")
            for r in layers])
    if args.json:
        for row in rows:
            append_record(args.json, make_record(
                "eviction", model=model.name, method=row.spec, task="eviction-error", length=settings.length, samples=1,
                seed=settings.seed, protocol="query-agnostic", **{k: v for k, v in dataclasses.asdict(row).items()
                                                                   if k != "spec"}))


def _print_scores(study: str, rows) -> None:
    from lowrank_kv_jax.evals.eviction import TABLE_6

    lines = []
    for row in rows:
        share, needle = 100 * row.cache_bytes / row.full_bytes, "" if row.needle is None else f"{row.needle:.0f}"
        lines.append((row.spec, TABLE_6.get(row.spec, ""), f"{share:.1f}%", f"{row.perplexity:.3f}", needle))
    _table(study, ("method", "nominal", "bytes of full", "perplexity", "needles %"), lines)


def _table(title: str, columns, lines) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
