"""`lowrank-kv diagnose`: how compressible a model's cache is, and how bases follow a shift of the text."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lowrank_kv_jax.cli.diagnose_tables import print_diagnostics
from lowrank_kv_jax.cli.options import WINDOW, add_model_options, append_records

HELP = "how compressible the cache is, and how bases follow a shift of the text"
TABLES = ("adaptation", "rest", "forgetting", "compressibility", "spectra")
REFINEMENT, REFINED = "refinement", "transform:bits=2"
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
                        help=f"low-rank methods to compare; by default ojakv and its static baseline, or {REFINED}")
    parser.add_argument("--tables", nargs="+", choices=(*TABLES, REFINEMENT), default=TABLES, metavar="TABLE",
                        help=f"which to measure, of {', '.join(TABLES)}; by default these; or {REFINEMENT}, of methods of"
                             " transform coding: what refining their bases by gradient is worth")
    parser.add_argument("--refreshes", nargs="+", type=int, default=[0, 16, 32, 64, 96], metavar="N",
                        help="forgetting: after which refreshes of 32 tokens of the last text to look, behind half a"
                             " window of the first; those beyond the model's context are left out (%(default)s)")
    parser.add_argument("--length", type=int,
                        help=f"tokens of a window ({WINDOW}, or the model's context if that is less)")
    parser.add_argument("--windows", type=int, default=4, help="windows to calibrate on (%(default)s)")
    parser.add_argument("--test-windows", type=int, default=1, help="windows of each text (%(default)s)")
    parser.add_argument("--refine", type=int, default=100, metavar="STEPS",
                        help="refinement: steps of Adam for each group of layers (%(default)s)")
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
    from lowrank_kv_jax.calibration.refine import check_refinable
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, load_from, window_length
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.studies.bases import adapting, diagnostics, forgetting, refinement

    usual = (REFINED,) if list(args.tables) == [REFINEMENT] else adapting.ADAPTATION_METHODS
    methods = list(parse_methods(args.methods or usual).values())
    for method in methods:
        if REFINEMENT in args.tables:
            check_refinable(method)
        if set(args.tables) - {REFINEMENT} and not method.rebuilds:
            raise ValueError(f"method {method.name!r} has no basis to diagnose; give a low-rank one")
    if args.plot and not {"spectra", "adaptation"} <= set(args.tables):
        raise ValueError(f"--plot {args.plot}: draws the tables adaptation and spectra; give them to --tables too")
    check_numbers(args, length=1, windows=1, test_windows=1, layers=1, seed=0, refreshes=0, refine=1)
    check_outputs(args)
    corpus = load_corpus(args.calibrate or HELD_OUT[0])
    sources = args.test or HELD_OUT[1]
    tests = dict(zip(_labels(sources), map(load_corpus, sources), strict=True))
    model = load_from(args)
    length = window_length(args, model)
    half = max(1, length // 2)
    most = (model.config.context - half) // forgetting.BLOCK
    refreshes = [n for n in args.refreshes if n <= most]
    if "forgetting" in args.tables and not refreshes:
        raise ValueError(f"--refreshes {min(args.refreshes)}: at least one must be at most {most}, as many as fit into "
                         f"the model's context of {model.config.context} tokens behind {half}")

    def windows_of(text: str, size: int):
        return token_windows(model.tokenizer, tests[text].texts, size, args.test_windows, args.seed, corpus=text)

    windows = {name: windows_of(name, length) for name in tests}
    if set(args.tables) - {REFINEMENT}:
        own = token_windows(model.tokenizer, corpus.texts, length, args.windows, args.seed, corpus=corpus.name)
        calibration = collect_moments(model, own, progress=True)
    first, last = list(tests)[0], list(tests)[-1]

    def forgotten():
        later = windows_of(last, max(1, forgetting.BLOCK * max(refreshes, default=0)))
        prompt = windows_of(first, half)
        return forgetting.forgetting_table(model, calibration, prompt, later, methods, refreshes, progress=True)

    def adapted(**learned):
        return adapting.adaptation_table(model, calibration, windows, methods, progress=True, **learned)

    makers = {
        "adaptation": adapted,
        "rest": lambda: adapted(learned=0.5),
        "forgetting": forgotten,
        "compressibility":
            lambda: diagnostics.compressibility_table(model, calibration, windows, args.layers, progress=True),
        "spectra": lambda: diagnostics.spectra_table(model, calibration),
        REFINEMENT: lambda: refinement.refinement_table(
            model, corpus, windows, methods, args.refine, length=length, windows=args.windows, seed=args.seed,
            progress=True,
        ),
    }
    found = {task: make() for task, make in makers.items() if task in args.tables}
    print_diagnostics("+".join(_labels(corpus.name.split("+"))), f"{first}, then {last}", found)
    for task, rows in found.items():
        append_records(args, "diagnose", rows, model=model.name, task=task, length=length,
                       samples=args.test_windows, seed=args.seed, calibration=corpus.name,
                       calibration_sha256=corpus.sha256)
    if args.plot:
        from lowrank_kv_jax.evals.studies.bases.plot import plot_diagnostics

        plot_diagnostics(args.plot, found["spectra"], found["adaptation"])
        print(f"drew {args.plot}")
    return 0


def _labels(sources: Sequence[str]) -> list[str]:
    """File names in the place of paths, unless two would be the same."""
    short = [Path(source).name if Path(source).exists() else source for source in sources]
    return [name if short.count(name) == 1 else source for name, source in zip(short, sources, strict=True)]
