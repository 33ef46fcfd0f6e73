"""`lowrank-kv estimators`: where bases can come from, compared."""

import argparse

from lowrank_kv_jax.cli.options import add_model_options, append_records
from lowrank_kv_jax.cli.tables import print_table

HELP = "basis estimators side by side: error, time, bytes"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "estimators", help=HELP,
        description="On the stream of StreamingKV, A.6, whose subspace changes; and on a real text that turns from prose "
                    "to code, each page of tokens in the basis learned from those before it.",
    )
    add_model_options(parser)
    parser.add_argument("--rank", type=float, default=0.5, help="share of the head's channels (%(default)s)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the text (%(default)s)")
    parser.add_argument("--page", type=int, default=128, help="tokens of an update (%(default)s)")
    parser.add_argument("--texts", nargs=2, default=["pydoc:second", "python"], metavar=("PROSE", "CODE"),
                        help="(pydoc:second python)")
    parser.add_argument("--seed", type=int, default=0, help="shifts the texts (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each row")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_from`, `load_corpus` and `token_windows`.
    """
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
    from lowrank_kv_jax.cli.options import check_context, check_numbers, check_outputs, load_from
    from lowrank_kv_jax.estimators.rank import resolve_rank
    from lowrank_kv_jax.evals.studies.bases import estimators as comparison
    from lowrank_kv_jax.evals.studies.subspaces.falsify import shifted_texts

    check_numbers(args, length=1, seed=0)
    check_outputs(args)
    if not 1 <= args.page <= args.length // 4:
        raise ValueError(f"--page {args.page}: must lie in 1..{args.length // 4}, a quarter of --length")
    model = load_from(args)
    check_context(args, model, length=0)
    rank = resolve_rank("--rank", args.rank, model.config.head_dim)
    texts = (token_windows(model.tokenizer, load_corpus(x).texts, args.length, 1, args.seed, name="--length ")
             for x in args.texts)
    shifted = shifted_texts(*texts).shifted
    _show(args, model, "stream", "Excess error on the stream of StreamingKV, A.6 (d 40, r 6)", comparison.stream_table())
    for tap, what in (("k", "keys"), ("v", "values")):
        rows = comparison.shift_table(model, shifted, rank, args.page, tap=tap)
        title = f"{what}, prose to code: RER of the next {args.page} tokens, rank {rank}"
        _show(args, model, tap, title, rows)
    return 0


def _show(args, model, task: str, title: str, rows) -> None:
    columns = {name: name.replace("_ms", ",\nms a layer").replace("bytes", "bytes\na head") for name in rows[0]}
    print_table(title, tuple(columns.values()),
                [[f"{x:.4f}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows],
                texts=("estimator",))
    append_records(args, "estimators", rows, model=model.name, task=task, length=args.length, seed=args.seed, samples=1)
