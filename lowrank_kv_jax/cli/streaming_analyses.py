"""The analyses of `lowrank-kv streaming`: tokens by text, columns, hyperparameters, prompt and answer."""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lowrank_kv_jax.cli.options import append_records
from lowrank_kv_jax.cli.tables import print_table

DRAWN = ("fisher", "distributions", "columns")
"""Studies with a figure."""


def add_analysis_options(parser: argparse.ArgumentParser) -> None:
    """What distributions, columns, spread and prefill take."""
    parser.add_argument("--texts", nargs="+", default=["pydoc:second", "python"], metavar="TEXT",
                        help="of distributions and columns, as for `calibrate --corpus` (%(default)s)")
    parser.add_argument("--text-length", type=int, default=2048, help="tokens of each of them (%(default)s)")
    parser.add_argument("--etas", nargs="+", type=float, default=[5e-5, 1e-5, 5e-6, 1e-6], help="of spread (%(default)s)")
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.05, 0.1, 0.2], help="of spread (%(default)s)")
    parser.add_argument("--iterations", nargs="+", type=int, default=[2, 3], help="n_iters, of spread (%(default)s)")
    parser.add_argument("--steps", nargs="+", type=int, default=[10],
                        help="s, of spread: tokens from one update to the next (%(default)s)")


def append(args: argparse.Namespace, task: str, length: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Records of a study."""
    append_records(args, "streaming", rows, model=args.model, task=task, length=length, seed=args.seed,
                   protocol="query-agnostic")


def figure_of(args: argparse.Namespace, study: str) -> str:
    """Where a study is drawn: the file of `--plot`, with the study's name where several are drawn."""
    if sum(name in args.studies for name in DRAWN) < 2:
        return args.plot
    path = Path(args.plot)
    return str(path.with_name(f"{path.stem}-{study}{path.suffix}"))


def texts_of(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """A prompt of each of --texts, if a study reads them."""
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows

    read = {"distributions", "columns"} & set(args.studies)
    return {name: token_windows(model.tokenizer, load_corpus(name).texts, args.text_length, 1, args.seed,
                                name="--text-length ") for name in (args.texts if read else ())}


def _fitted(args, model, settings, texts):
    """Methods, their bases, and the texts."""
    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.evals.asking.methods import bases_of, parse_methods
    from lowrank_kv_jax.evals.studies.streaming.hyperparameters import printed_base
    from lowrank_kv_jax.evals.studies.streaming.quality import ENDS
    from lowrank_kv_jax.evals.studies.streaming.shifted_texts import CALIBRATE

    rank = min(settings.ranks)
    methods = parse_methods(args.methods or [f"palu:rank={rank},{ENDS}", printed_base(rank),
                                             f"streamingkv:rank={rank},{ENDS}"])
    return methods, bases_of(model, methods, load_corpus(CALIBRATE), seed=args.seed, dtype="float32"), texts


def run_distributions(args: argparse.Namespace, model: Any, settings: Any, texts: Mapping[str, Any]) -> None:
    """Figures 1, 7 and 8."""
    from lowrank_kv_jax.evals.studies.streaming import distributions as study

    rows = study.distributions(model, *_fitted(args, model, settings, texts), progress=True)
    layer = study.shown_layer(model.config.num_layers)
    names = [f"{100 * q:.0f}%" for q in study.QUANTILES]
    for shown, title in ((layer, f"layer {layer + 1} of {model.config.num_layers}"), (-1, "all layers")):
        print_table(f"quantiles over tokens, {title}", ("method", "text", "side", *(f"cosine {q}" for q in names),
                                                        "MSE 50%", "MSE 95%"),
                    [(row.spec, row.text, row.side, *(f"{x:.4f}" for x in row.cosine), f"{row.mse[2]:.4f}",
                      f"{row.mse[-1]:.4f}") for row in rows if row.layer == shown], texts=3)
    _draw(args, "distributions", lambda path: study.plot_distributions(path, rows, _title(args, model)))
    append(args, "distributions", args.text_length,
           [{**dataclasses.asdict(row), "quantiles": study.QUANTILES} for row in rows])


def run_columns(args: argparse.Namespace, model: Any, settings: Any, texts: Mapping[str, Any]) -> None:
    """Figures 5b and 5c."""
    from lowrank_kv_jax.evals.studies.streaming import columns as study

    rows = study.columns(model, *_fitted(args, model, settings, texts), progress=True)
    shares, grouped = (0.125, 0.25, 0.5, 0.75, 1.0), {}
    for row in rows:
        grouped.setdefault((row.spec, row.text, row.side), []).append(row)
    print_table("explained variance by the first columns, and alignment with the calibrated ones, means over layers",
                ("method", "text", "side", *(f"{100 * share:g}% of them" for share in shares), "aligned", "least",
                 "subspace"),
                [(*key, *(f"{statistics.fmean(row.at(share) for row in own):.4f}" for share in shares),
                  f"{statistics.fmean(statistics.fmean(row.aligned) for row in own):.4f}",
                  f"{statistics.fmean(min(row.aligned) for row in own):.4f}",
                  f"{statistics.fmean(row.subspace for row in own):.4f}") for key, own in grouped.items()], texts=3)
    _draw(args, "columns", lambda path: study.plot_columns(path, rows, _title(args, model)))
    append(args, "columns", args.text_length, map(dataclasses.asdict, rows))


def run_spread(args: argparse.Namespace, model: Any, settings: Any, tasks: tuple[str, ...]) -> None:
    """Tables 4 and 7."""
    from lowrank_kv_jax.evals.studies.streaming import hyperparameters as study
    from lowrank_kv_jax.evals.studies.streaming.quality import ENDS, scores, with_prefill

    rank = min(settings.ranks)
    grid = study.Grid(tuple(args.etas), tuple(args.alphas), tuple(args.iterations), tuple(args.steps))
    (palu,) = with_prefill([f"palu:rank={rank},{ENDS}"], args.prefill)
    (base,) = with_prefill([study.printed_base(rank)], args.prefill)
    specs = study.grid_specs(base, grid)
    rows = scores(model, [palu, *specs], dataclasses.replace(settings, samples=0), tasks, json=args.json,
                  progress=True)
    found = study.spreads(rows, base, specs, palu)
    print_table(f"{base}, {len(specs)} settings: nats a token",
                ("text", "Palu", "mean", "std", "gain at worst", "at best"),
                [(row.text, f"{statistics.fmean(rows[palu].nll[row.text]):.4f}", f"{row.mean:.4f}", f"{row.std:.5f}",
                  f"{row.least:+.5f}", f"{row.most:+.5f}") for row in found])
    append(args, "spread", settings.context, [{**dataclasses.asdict(row), "grid": dataclasses.asdict(grid)}
                                              for row in found])


def run_prefill(args: argparse.Namespace, model: Any) -> None:
    """Table 9, with and without updates."""
    from lowrank_kv_jax.evals.studies.streaming.speed import end_to_end, prefill_specs

    rows = end_to_end(model, args.methods or prefill_specs(min(args.ranks)), args.timed_length, rounds=args.rounds)
    first = rows[0].medians[0]
    lines = []
    for row in rows:
        prefill, decode = row.medians
        lines.append((row.spec, f"{prefill:.3f}", f"{min(row.prefill):.3f}-{max(row.prefill):.3f}",
                      f"{100 * (prefill / first - 1):+.1f}%", f"{decode:.3f}", f"{prefill + decode:.3f}",
                      f"{row.length / prefill:.0f}", f"{row.steps / decode:.1f}"))
    print_table(f"a prompt of {args.timed_length} tokens and {rows[0].steps} more, float32 caches, seconds",
                ("method", "prefill", "least-most", f"over {rows[0].spec}", "decode", "total", "prefill tok/s",
                 "decode tok/s"), lines)
    append(args, "prefill-and-decode", args.timed_length, map(dataclasses.asdict, rows))


def run_learning(args: argparse.Namespace, model: Any) -> None:
    """Table 9 by measures that a busy machine does not spoil."""
    from lowrank_kv_jax.evals.studies.streaming.learning_cost import prompt_costs
    from lowrank_kv_jax.evals.studies.streaming.speed import prefill_specs

    rows = prompt_costs(model, args.methods or prefill_specs(min(args.ranks)), args.timed_length, args.rounds)
    first = rows[0]
    print_table(f"a prompt of {args.timed_length} tokens, float32 caches; one layer as XLA counts it (a loop's body "
                f"once), attending and coding; least of {args.rounds} rounds",
                ("method", "GFLOP", f"over {first.spec}", "attending, GFLOP", "MB", "coding, GFLOP", "MB",
                 "attending, ms", "coding, ms", "all layers, s", f"over {first.spec}"),
                [(row.spec, f"{row.flops / 1e9:.2f}", f"{100 * (row.flops / first.flops - 1):+.2f}%",
                  *(f"{x:.3f}" for part in (row.attending, row.coding) for x in (part.flops / 1e9, part.bytes / 1e6)),
                  f"{1e3 * row.attending_s:.2f}", f"{1e3 * row.coding_s:.2f}", f"{row.seconds:.3f}",
                  f"{100 * (row.seconds / first.seconds - 1):+.2f}%") for row in rows])
    append(args, "learning", args.timed_length, map(dataclasses.asdict, rows))


def _title(args, model) -> str:
    return f"{model.name}, {args.text_length} tokens of {', '.join(args.texts)}"


def _draw(args, study: str, draw: Callable[[str], None]) -> None:
    if args.plot:
        path = figure_of(args, study)
        draw(path)
        print(f"drew {path}")
