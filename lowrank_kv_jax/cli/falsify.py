"""`lowrank-kv falsify`: the four falsifiers of Online Subspace Projection on a model."""

import argparse

from lowrank_kv_jax.cli.options import add_model_options, append_records
from lowrank_kv_jax.cli.tables import print_table

HELP = "the four falsifiers of Online Subspace Projection, with a verdict for each"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "falsify", help=HELP,
        description="Perplexities are of text that is scored through the compressed cache of the tokens before it. Bases "
                    "are calibrated on prose; the shifted text turns from prose to code in its middle.",
    )
    add_model_options(parser)
    parser.add_argument("--adaptive", default="osp:follow", metavar="SPEC",
                        help="the adaptive variant, without its rank (%(default)s)")
    parser.add_argument("--static", default="osp-static", metavar="SPEC",
                        help="the static variant, without its rank (%(default)s)")
    parser.add_argument("--ranks", nargs="+", type=float, default=[0.25, 0.5, 0.75], metavar="R",
                        help="fractions of the head (0.25 0.5 0.75)")
    parser.add_argument("--rank", type=float, default=0.5, help="of falsifiers 3 and 4 (%(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the context (%(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024], metavar="N",
                        help="contexts of falsifier 3 (256 512 1024)")
    parser.add_argument("--scored", type=int, default=256, help="tokens that are scored (%(default)s)")
    parser.add_argument("--windows", type=int, default=2, help="texts of each kind (%(default)s)")
    parser.add_argument("--calibrate", default="pydoc:first", help="corpus of the bases (%(default)s)")
    parser.add_argument("--calibrate-windows", type=int, default=4, help="of 2048 tokens (%(default)s)")
    parser.add_argument("--texts", nargs=2, default=["pydoc:second", "python"], metavar=("PROSE", "CODE"),
                        help="what is measured on (pydoc:second python)")
    parser.add_argument("--falsifiers", nargs="*", type=int, choices=(1, 2, 3, 4), default=[1, 2, 3, 4], help="(all)")
    parser.add_argument("--residuals", type=int, metavar="N",
                        help="also print what both variants lose of N parts of the text that turns from prose to code, "
                             "and how many chunks they use")
    parser.add_argument("--thresholds", type=float, metavar="P",
                        help="also print the tau_k and tau_v that P percent of all pages of prose stay below, under the "
                             "variant's look-ahead, in a prompt and while decoding")
    parser.add_argument("--drift", action="store_true",
                        help="also print residuals against position and RoPE phase, and chunk counts against drift")
    parser.add_argument("--spectra", type=int, metavar="L",
                        help="also print the ranks that hold 90%% of the energy of chunks of L tokens")
    parser.add_argument("--seed", type=int, default=0, help="shifts the windows (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each row")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_from`, `load_corpus`, `token_windows` and the evaluations.
    """
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
    from lowrank_kv_jax.cli.options import check_context, check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import moments_of, parse_methods
    from lowrank_kv_jax.evals.studies.subspaces import falsify

    check_numbers(args, residuals=1, length=1, lengths=1, scored=1, windows=1, calibrate_windows=1, seed=0)
    check_outputs(args)
    methods = parse_methods(list(dict.fromkeys((args.static, args.adaptive))))
    for option in ("static", "adaptive"):
        falsify.check_without_rank(f"--{option}", getattr(args, option), [*args.ranks, args.rank])
    if 3 in args.falsifiers and max(args.lengths) > args.length:
        raise ValueError(f"--lengths {max(args.lengths)}: must be at most --length {args.length} for falsifier 3")
    model = load_from(args)
    check_context(args, model, length=args.scored)
    size = args.length + args.scored
    prose, code = (
        token_windows(model.tokenizer, load_corpus(source).texts, size, args.windows, args.seed, corpus=source)
        for source in args.texts
    )
    moments = moments_of(model, methods, load_corpus(args.calibrate), windows=args.calibrate_windows, seed=args.seed,
                         progress=True)
    texts = falsify.shifted_texts(prose, code)
    measured = falsify.Run(model, moments, args.static, args.adaptive)
    verdicts = (
        lambda: falsify.no_rank_suffices(measured, texts, args.ranks, args.scored),
        lambda: falsify.adapting_is_worse(measured, texts, args.ranks, args.scored),
        lambda: falsify.error_grows_with_length(measured, texts, args.lengths, args.rank, args.scored),
        lambda: falsify.bounds_predict_nothing(measured, texts.prose[:1, : args.length], args.rank),
    )
    for number in args.falsifiers:
        _show(args, model, number, verdicts[number - 1]())
    if args.residuals is not None:
        _show_residuals(args, measured, texts.shifted[:, : args.length])
    if args.thresholds is not None:
        for place, decoding in (("a prompt", False), ("decoded text", True)):
            k, v = falsify.residual_thresholds(measured, prose, args.rank, args.thresholds, decoding)
            print(f"{args.thresholds:g}% of the pages of {place} stay below tau_k={k:.3f},tau_v={v:.3f} "
                  f"({args.adaptive}, rank {args.rank:g})")
    if args.drift:
        _show_drift(args, measured, texts)
    if args.spectra is not None:
        _show_spectra(args, falsify.spectra_by_chunk(model, texts.shifted, args.spectra))
    return 0


def _show(args, model, number: int, verdict) -> None:
    outcome = "FALSIFIED" if verdict.falsified else "not falsified"
    columns = [column.replace("_", " ") for column in verdict.figures[0]]
    print_table(f"{number}. {verdict.claim}: {outcome}", columns,
                [["" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()]
                 for row in verdict.figures],
                texts=("text", "variant", "what"))
    print(f"{outcome}: {verdict.summary}\n")
    append_records(args, "falsify", verdict.figures, model=model.name, task=f"falsifier {number}", seed=args.seed,
                   samples=args.windows, claim=verdict.claim, falsified=verdict.falsified, length=args.length)


def _show_residuals(args, measured, tokens) -> None:
    """Relative residual energy of parts of a text, chunks and bytes."""
    from lowrank_kv_jax.evals.studies.subspaces.residuals import residuals_by_part
    from lowrank_kv_jax.method.accounting import full_cache_bytes

    rows, full = [], full_cache_bytes(measured.model.config.attention, tokens.shape[1])
    for (name, rank), method in measured.methods((args.rank,), ("static", "adaptive")).items():
        bases, of_full = measured.bases(method), measured.row_bytes(method, tokens.shape[1]) / full
        found = residuals_by_part(measured.model, method, tokens, bases, measured.dtype, args.residuals)
        rows.append({"variant": name, "rank": rank, "of_full": of_full, **found})
    append_records(args, "falsify", rows, model=measured.model.name, task="residuals", seed=args.seed,
                   samples=args.windows, length=args.length)

    def cells(row):
        sides = (" ".join(f"{x:.3f}" for x in row[side]) for side in ("rer_k", "rer_v"))
        chunks = f"{row['chunks']:.1f} of {row['slots']:.0f}" if "chunks" in row else ""
        return [row["variant"], f"{row['of_full']:.3f}", *sides, chunks]

    print_table(f"RER of {args.residuals} parts, prose then code: {args.static}, {args.adaptive}, rank {args.rank:g}",
                ("variant", "of full", "keys", "values", "chunks"), list(map(cells, rows)), texts=("variant",))


def _show_drift(args, measured, texts) -> None:
    """Residuals by position and phase, and chunks by drift, under thresholds that half of the pages exceed where none are
    given."""
    import dataclasses

    from lowrank_kv_jax.evals.studies.subspaces import drift, falsify

    (method,) = measured.methods((args.rank,), ("adaptive",)).values()
    given, bases = (measured.model, method), measured.bases(method)
    rows = drift.residual_profile(*given, texts.shifted[:1, : args.length], bases, measured.dtype)
    _show_rows("Relative residual energy by position and by phase since the chunk began (prose, then code)", rows)
    if method.tau_k is None and method.tau_v is None:
        k, v = falsify.residual_thresholds(measured, texts.prose, args.rank, 50, decoding=not method.lookahead)
        method = dataclasses.replace(method, tau_k=k, tau_v=v)
    named = {name: getattr(texts, name)[:1, : args.length] for name in ("prose", "code", "shifted")}
    rows = drift.chunks_against_drift(measured.model, method, named, bases, measured.dtype)
    _show_rows(f"Chunks against drift, tau_k={method.tau_k:.3f},tau_v={method.tau_v:.3f}", rows)


def _show_rows(title: str, rows) -> None:
    cells = [["" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    print_table(title, [name.replace("_", " ") for name in rows[0]], cells, texts=("what",))


def _show_spectra(args, spectra) -> None:
    import numpy as np

    lines = []
    for row in spectra:
        means = [*np.mean(row["ranks"], axis=(0, 1)), np.mean(row["whole"])]
        lines.append((row["tap"], *(f"{mean:.1f}" for mean in means)))
    chunks = map(str, range(len(spectra[0]["ranks"][0][0])))
    print_table(f"Rank that holds 90% of the energy: chunks of {args.spectra} tokens, mean over layers and heads",
                ("tap", *chunks, "whole"), lines)
