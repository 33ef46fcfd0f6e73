"""`lowrank-kv report`: tables and figures from the records of evaluations."""

import argparse

HELP = "tables and figures from the records of evaluations"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "report", help=HELP,
        description="From files of records (--json of the other commands): a Markdown table on standard "
                    "output and, with --out, report.md, report.html (one file, figures inside) and the "
                    "figures as PNG.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="files of records, together one report")
    parser.add_argument("--out", metavar="DIR", help="write the report there")
    parser.add_argument("--baseline", metavar="SPEC", help="method that the others are compared with (full)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK",
                        help="only these tasks, or RULER's groups, e.g. ruler-6")
    parser.add_argument("--title", default="Compressed KV caches: quality and bytes", help="of the page")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the table and write the report.

    Raises:
        ValueError, OSError: as `read_report`.
    """
    from lowrank_kv_jax.checks.extras import check_extra
    from lowrank_kv_jax.evals.report import draw_figures, markdown, page, read_report
    from lowrank_kv_jax.files import expanded, write_text

    if args.out:
        check_extra("matplotlib", f"--out {args.out}")
        _check_folder(args.out)
    sections = read_report(args.results, args.baseline, args.tasks)
    text, told = markdown(sections), ""
    if args.out:
        out = expanded(args.out)
        figures = draw_figures(sections, out)
        write_text(out / "report.md", f"{MADE_HERE}\n{text}")
        write_text(out / "report.html", f"{page(sections, figures, args.title)}\n{MADE_HERE}\n")
        told = f"\nwrote {out / 'report.html'}, report.md and {sum(map(len, figures.values()))} figures"
    print(text + told)
    return 0


MADE_HERE = "<!-- lowrank-kv report -->"
"""In what the command writes, so that it replaces nothing else."""


def _check_folder(path: str) -> None:
    """Raise ValueError where the report cannot be written, or would replace files that are no report's."""
    from lowrank_kv_jax.evals.results.figure_file import check_figure
    from lowrank_kv_jax.files import check_made, expanded

    out = expanded(path)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {path}: is no directory")
    for name in ("report.md", "report.html"):
        check_made(out / name, MADE_HERE)
    for figure in sorted(out.glob("[0-9]*-*.png")):  # named as those of a report
        check_figure(figure)
