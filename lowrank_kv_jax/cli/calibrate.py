"""`lowrank-kv calibrate`: fit a method's bases to texts and save them."""

import argparse

import numpy as np

from lowrank_kv_jax.cli.options import WINDOW, add_model_options
from lowrank_kv_jax.method.group import GroupBases
from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES, default_cache_dtype

HELP = "fit the bases of a method to texts and save them"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("calibrate", help=HELP, description=HELP)
    add_model_options(parser)
    parser.add_argument("--method", required=True, help="e.g. ojakv:rank=0.5 (see `lowrank-kv methods`)")
    parser.add_argument("--corpus", nargs="+", default=None, metavar="TEXT",
                        help="text files, built-in names (pydoc, python) or hub datasets (organisation/name"
                             "[:config[:split]]); by default pydoc, Python's own language reference")
    parser.add_argument("--length", type=int,
                        help=f"tokens of a window ({WINDOW}, or the model's context if that is less)")
    parser.add_argument("--windows", type=int, default=4, help="windows, evenly spaced (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="shifts the windows (%(default)s)")
    parser.add_argument("--bases-dtype", default=default_cache_dtype(), choices=CACHE_DTYPES,
                        help="of the bases (%(default)s)")
    parser.add_argument("--refine", type=int, default=0, metavar="STEPS",
                        help="steps of Adam on the attention outputs of each layer group, for methods whose bases can be "
                             "refined (%(default)s)")
    parser.add_argument("--fisher-length", type=int, default=512, metavar="N",
                        help="tokens of a sequence whose gradient is one sample of Fisher information, for methods whose "
                             "ranks it decides (%(default)s)")
    parser.add_argument("--fisher-sequences", type=int, metavar="N", help="how many (all that the windows hold)")
    parser.add_argument("--out", required=True, metavar="DIR",
                        help="directory to save to; windows that are done lie beside it until then, and a command that "
                             "was killed goes on from them")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Calibrate, save and say what was saved.

    Raises:
        ValueError, FileNotFoundError: as `load_from`, `parse_method`, `load_corpus`, `calibrate`,
            `save_bases`.
    """
    import lowrank_kv_jax.methods  # noqa: F401 - fills the registry
    from lowrank_kv_jax.calibration.calibrate import calibrate
    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.calibration.refine import check_refinable
    from lowrank_kv_jax.cli.options import check_numbers, load_from, window_length
    from lowrank_kv_jax.evals.results.records import check_writable
    from lowrank_kv_jax.files import expanded
    from lowrank_kv_jax.methods.parse import parse_method, spell_method
    from lowrank_kv_jax.saving.saved_bases import check_bases_replaceable, save_bases

    method = parse_method(args.method)
    if not method.calibrated:
        raise ValueError(f"method {method.name!r} takes nothing from calibration: use it as it is")
    check_numbers(args, length=1, windows=1, seed=0, refine=0, fisher_length=2, fisher_sequences=1)
    if args.refine:
        check_refinable(method)
    check_bases_replaceable(args.out)
    if not expanded(args.out).exists():
        check_writable(args.out)
    corpus = load_corpus(args.corpus)
    model = load_from(args)
    method.validate(model.config.attention)
    length = window_length(args, model)
    settings = {"length": length, "windows": args.windows, "seed": args.seed, "refine": args.refine}
    if "fisher" in method.reads:
        settings |= {"fisher_length": args.fisher_length, "fisher_sequences": args.fisher_sequences}
    bases = calibrate(
        model, method, corpus, **settings, dtype=args.bases_dtype, progress=True, resume=args.out,
        keep=lambda bases: save_bases(args.out, bases, model, method, corpus=corpus, settings=settings),
    )
    print(f"{spell_method(method)} for {model.name}: {_ranks(bases)}")
    print(f"calibrated on {corpus.name} (sha256 {corpus.sha256[:12]}), saved to {args.out}")
    return 0


def _ranks(bases) -> str:
    """Ranks of the bases, over all groups, and the layers' shares of a budget, whichever there are."""
    codecs = [group.codec if isinstance(group, GroupBases) else group for group in bases]
    shares = [one for group in bases for one in (group.selection if isinstance(group, GroupBases) else (group,))]
    parts = []
    for name in ("k", "v"):
        ranks = np.array([_rank(group, name, x) for group in codecs if (x := getattr(group, name, None)) is not None])
        if ranks.size:
            low, high = ranks.min(), ranks.max()
            parts.append(f"{name} rank {low}" + ("" if low == high else f" to {high}, mean {ranks.mean():.1f}"))
    found = [f"{one.share:g}" for one in shares if hasattr(one, "share")]
    return ", ".join(parts + ([f"shares of the layers {' '.join(found)}"] if found else []))


def _rank(bases, side: str, basis) -> int:
    """Columns of a basis; bases that hold them in several arrays say how many."""
    return bases.rank(side) if hasattr(bases, "rank") else basis.shape[-1]
