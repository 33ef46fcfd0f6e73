"""`lowrank-kv diagnose`: how compressible a model's cache is, and how bases follow a shift of the text."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lowrank_kv_jax.cli.options import add_model_options, append_records
from lowrank_kv_jax.cli.tables import print_table

HELP = "how compressible the cache is, and how bases follow a shift of the text"
HELD_OUT = ("pydoc:first", ("pydoc:second", "python"))


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("diagnose", help=HELP, description=HELP)
    add_model_options(parser)
    parser.add_argument("--calibrate", nargs="+", default=None, metavar="TEXT",
                        help="what to fit bases to, as for `calibrate --corpus`; by default half of pydoc")
    parser.add_argument("--test", nargs="+", default=None, metavar="TEXT",
                        help="texts to measure on, one by one; by default its other half and Python source")
    parser.add_argument("--methods", nargs="+", default=None, metavar="SPEC",
                        help="low-rank methods to compare; by default ojakv and its static baseline")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window (%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="windows to calibrate on (%(default)s)")
    parser.add_argument("--test-windows", type=int, default=1, help="windows of each text (%(default)s)")
    parser.add_argument("--layers", type=int, default=5,
                        help="layers of a group in the cross-layer rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="shifts the windows (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each row")
    parser.add_argument("--plot", metavar="PNG", help="draw spectra and RER by layer")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, FileNotFoundError: a method without a basis, or as `parse_method`, `load_from`, `load_corpus`,
            `token_windows` and the tables.
    """
    from lowrank_kv_jax.calibration.calibrate import collect_moments
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.studies.bases import diagnostics

    methods = _methods(args.methods or diagnostics.ADAPTATION_METHODS)
    check_numbers(args, length=1, windows=1, test_windows=1, layers=1, seed=0)
    check_outputs(args)
    corpus = load_corpus(args.calibrate or HELD_OUT[0])
    sources = args.test or HELD_OUT[1]
    tests = dict(zip(_labels(sources), map(load_corpus, sources), strict=True))
    model = load_from(args)
    length = min(args.length, model.config.context)
    windows = {name: token_windows(model.tokenizer, test.texts, length, args.test_windows, args.seed)
               for name, test in tests.items()}
    calibration = collect_moments(
        model, token_windows(model.tokenizer, corpus.texts, length, args.windows, args.seed), progress=True
    )
    adaptation = diagnostics.adaptation_table(model, calibration, windows, methods, progress=True)
    compressible = diagnostics.compressibility_table(model, calibration, windows, args.layers, progress=True)
    spectra = diagnostics.spectra_table(model, calibration)
    _print_tables("+".join(_labels(corpus.name.split("+"))), compressible, adaptation, spectra)
    for task, rows in {"compressibility": compressible, "adaptation": adaptation, "spectra": spectra}.items():
        append_records(args, "diagnose", rows, model=model.name, task=task, length=args.length,
                       samples=args.test_windows, seed=args.seed, calibration=corpus.name,
                       calibration_sha256=corpus.sha256)
    if args.plot:
        from lowrank_kv_jax.evals.studies.bases.plot import plot_diagnostics

        plot_diagnostics(args.plot, spectra, adaptation)
        print(f"drew {args.plot}")
    return 0


def _methods(specs: Sequence[str]) -> list:
    from lowrank_kv_jax.evals.asking.methods import parse_methods

    methods = list(parse_methods(specs).values())
    for method in methods:
        if not method.rebuilds:
            raise ValueError(f"method {method.name!r} has no basis to diagnose; give a low-rank one")
    return methods


def _labels(sources: Sequence[str]) -> list[str]:
    """File names in the place of paths, unless two would be the same."""
    short = [Path(source).name if Path(source).exists() else source for source in sources]
    return [name if short.count(name) == 1 else source for name, source in zip(short, sources, strict=True)]


def _print_tables(calibrated_on: str, compressibility, adaptation, spectra) -> None:
    texts = list(dict.fromkeys(row["text"] for row in compressibility))
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in compressibility):
        rows = [row for row in compressibility if row["kind"] == kind]
        cells = [_number(row[column]) for row in rows for column in ("static", "oracle")]
        lines.append((kind, f"{rows[0]['rank']}/{rows[0]['width']}", *cells))
    print_table(f"How compressible the cache is: RER, bases fitted to {calibrated_on}",
                ("what", "rank", *(f"{text}\n{kind}" for text in texts for kind in ("fitted", "oracle"))), lines)
    for text in texts:
        lines = []
        for row in sorted((row for row in adaptation if row["text"] == text), key=lambda row: row["side"]):
            side, rank = {"k": "keys", "v": "values"}[row["side"]], f"{row['rank']}/{row['width']}"
            lines.append((side, row["method"], rank,
                          *(_number(row[metric]) for metric in ("rer", "oracle_rer", "overlap", "cosine"))))
        print_table(f"How bases follow the text: those with which each method reads {text}",
                    ("", "method", "rank", "RER", "oracle's", "overlap", "cosine"), lines, texts=2)
    lines = []
    for row in spectra:
        flat = [[rank for layer in ranks for rank in layer] for ranks in row["ranks"].values()]
        lines.append((f"{row['tap']} (of {row['width']})",
                      *(f"{sum(ranks) / len(ranks):.1f}, {max(ranks)}" for ranks in flat)))
    print_table(f"Ranks that hold a share of the energy on {calibrated_on}: mean over heads, largest",
                ("tap", *(f"{float(energy):.0%}" for energy in spectra[0]["ranks"])), lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


