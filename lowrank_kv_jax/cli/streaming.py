"""`lowrank-kv streaming`: what projections that learn while they run gain over static ones, and what they cost."""

import argparse
import dataclasses
from typing import Any

from lowrank_kv_jax.cli.options import add_model_options
from lowrank_kv_jax.cli.streaming_analyses import (
    DRAWN,
    add_analysis_options,
    append,
    figure_of,
    run_columns,
    run_distributions,
    run_learning,
    run_prefill,
    run_spread,
    texts_of,
)
from lowrank_kv_jax.cli.tables import print_table

HELP = "StreamingKV beside Palu: quality after a shift, ablations, analyses of bases, Fisher overlap, speed"
STUDIES = ("stream", "quality", "ablation", "spread", "reconstruction", "distributions", "columns", "fisher", "prefill",
           "learning", "speed")
SCORED = ("quality", "ablation")


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "streaming", help=HELP,
        description="stream: static, prefill-only and prefill+decode bases on a synthetic stream (StreamingKV, A.6). "
                    "quality: perplexity through the cache in domain and after a shift, needles, at two ranks. "
                    "ablation: triangle, joint or group updates, eta and alpha (tables 3 and 4). spread: the printed "
                    "form over its grid of hyperparameters (table 7). reconstruction: cosine and explained variance "
                    "(figure 5a), and equation 15 on hidden states. distributions: cosine and error of single tokens by "
                    "text (figures 1, 7 and 8). columns: what columns explain, their alignment with the calibrated ones "
                    "(5b and 5c). fisher: overlap of two corpora by frequency band (figure 3). prefill: time of a "
                    "prompt and its answer, with and without updates (table 9). learning: FLOPs, bytes and least "
                    "times of a prompt's layers, the same. speed: decode time beside its floor.",
    )
    add_model_options(parser)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="(all)")
    parser.add_argument("--ranks", nargs="+", type=float, default=[0.7, 0.5], metavar="R", help="(0.7 0.5)")
    parser.add_argument("--methods", nargs="+", metavar="SPEC",
                        help="instead of those of the study, but for stream, spread, fisher and speed; gains are over "
                             "each `palu`")
    parser.add_argument("--prefill", choices=("exact", "compressed"), default="exact",
                        help="what the prompt attends to in the study's own methods of quality, ablation and spread: its "
                             "own keys and values, or what they are coded as, as in the papers (%(default)s)")
    parser.add_argument("--tasks", nargs="*", metavar="TASK",
                        help="texts of quality and spread: prose, code, \"prose, then code\" (these by default), "
                             "headers, make, html, changes, tables, asyncio, email, unittest; `shifted` for all but "
                             "prose")
    parser.add_argument("--context", type=int, default=1024, help="tokens that are compressed (%(default)s)")
    parser.add_argument("--scored", type=int, default=384, help="tokens scored after them (%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="texts of each task (%(default)s)")
    parser.add_argument("--samples", type=int, default=2,
                        help="needles of each of four tasks of RULER, 0 for none (%(default)s)")
    add_analysis_options(parser)
    parser.add_argument("--bands", type=int, default=8, help="of singular vectors (%(default)s)")
    parser.add_argument("--corpora", nargs=2, default=["pydoc:first", "python"], metavar="TEXT",
                        help="whose Fisher information is compared (%(default)s)")
    parser.add_argument("--timed-length", type=int, default=4096, metavar="N",
                        help="context in which decoding is timed, and prompt that is (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that compiles (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and needles (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append records; scores that it holds are not computed again")
    parser.add_argument("--plot", metavar="PNG",
                        help="draw fisher, distributions and columns; of several, each to a file with its name")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_model` and the evaluations.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, check_plot, device_line, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.studies.streaming.quality import Settings

    settings = Settings(tuple(args.ranks), args.context, args.scored, args.windows, samples=args.samples, seed=args.seed)
    check_numbers(args, bands=1, timed_length=1, rounds=1, seed=0, text_length=2, iterations=1, steps=1)
    check_outputs(args)
    for study in set(DRAWN).intersection(args.studies if args.plot else ()):
        check_plot(figure_of(args, study))
    parse_methods(args.methods or ())
    if set(args.studies) == {"stream"}:
        _stream(args)
        return 0
    if {"quality", "spread"} & set(args.studies):
        _tasks(args)
    model = load_from(args)
    _check_lengths(args, model)
    _check_methods(args, model, settings)
    texts, pair = texts_of(args, model), _compared(args, model) if "fisher" in args.studies else []
    if "stream" in args.studies:
        _stream(args)
    for study in SCORED:
        if study in args.studies:
            _scores(args, model, settings, study)
    if "spread" in args.studies:
        run_spread(args, model, settings, _tasks(args))
    if "reconstruction" in args.studies:
        _reconstruction(args, model, settings)
    if "distributions" in args.studies:
        run_distributions(args, model, settings, texts)
    if "columns" in args.studies:
        run_columns(args, model, settings, texts)
    if "fisher" in args.studies:
        _fisher(args, model, pair)
    if "prefill" in args.studies:
        run_prefill(args, model)
    if "learning" in args.studies:
        run_learning(args, model)
    if "speed" in args.studies:
        _speed(args, model)
    print(device_line())
    return 0


def _check_lengths(args, model) -> None:
    """Refuse now what a later study would, after others have measured for minutes."""
    from lowrank_kv_jax.cli.options import check_context
    from lowrank_kv_jax.evals.studies.streaming.reconstruction import check_hidden
    from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK

    scored, analysed = {"context": args.scored}, {"text_length": 0}
    needs = {
        "quality": scored, "ablation": scored, "spread": scored, "distributions": analysed, "columns": analysed,
        "prefill": {"timed_length": DEFAULT_BLOCK}, "learning": {"timed_length": DEFAULT_BLOCK},
        "speed": {"timed_length": 2 * DEFAULT_BLOCK},
    }
    for study in args.studies:
        check_context(args, model, **needs.get(study, {}))
    if "reconstruction" in args.studies:
        check_hidden(model)


def _check_methods(args, model, settings) -> None:
    """The same of methods that do not suit the model, and of Fisher information that it has not."""
    from lowrank_kv_jax.calibration.fisher import check_projections
    from lowrank_kv_jax.evals.asking.methods import check_methods
    from lowrank_kv_jax.methods.parse import parse_method

    specs = [spec for study in SCORED if study in args.studies for spec in _specs(args, model, settings, study)]
    if {"reconstruction", "distributions", "columns"} & set(args.studies):
        specs += args.methods or ()
    methods = {spec: parse_method(spec) for spec in specs}
    if "fisher" in args.studies:
        check_projections(model.params, "the study fisher", "")
    if any("fisher" in method.reads for method in methods.values()):
        check_projections(model.params)
    check_methods(model, methods, "streaming")


def _stream(args) -> None:
    from lowrank_kv_jax.evals.studies.bases.piecewise_stream import Followed, follow_stream, piecewise_stream

    errors = follow_stream(piecewise_stream(segments=4, steps=60, seed=args.seed))
    per_segment = {name: getattr(errors, name).reshape(4, -1).mean(1) for name in Followed._fields}
    print_table("normalised reconstruction error on the stream of A.6, by segment",
                ("basis", "1", "2", "3", "4", "mean"),
                [(name, *(f"{x:.4f}" for x in found), f"{found.mean():.4f}") for name, found in per_segment.items()])
    append(args, "stream", 0, [{"spec": name, "errors": found.tolist()} for name, found in per_segment.items()])


def _specs(args, model, settings, study: str) -> list[str]:
    """The methods of one of `SCORED`."""
    from lowrank_kv_jax.evals.studies.streaming import quality as streaming
    from lowrank_kv_jax.methods.parse import parse_method

    spec = model.config.attention
    palu: Any = parse_method("palu")
    width = spec.head_dim * palu.group_of(spec)
    own = [named for rank in settings.ranks for named in streaming.quality_specs(rank, width)]
    if study == "ablation":
        own = streaming.ablation_specs(min(settings.ranks))
    return ["full", *(args.methods or streaming.with_prefill(own, args.prefill))]


def _scores(args, model, settings, study: str) -> None:
    from lowrank_kv_jax.evals.studies.streaming import quality as streaming

    tasks, specs = _tasks(args), _specs(args, model, settings, study)
    if study == "ablation":
        settings, tasks = dataclasses.replace(settings, samples=0), ("code",)
    rows = streaming.scores(model, specs, settings, tasks, json=args.json, progress=True)
    if tasks:
        print_table(study, ("method", "x smaller", *tasks),
                    [(row.spec, f"{row.smaller:.2f}", *(f"{row.perplexity[task]:.3f}" for task in tasks))
                     for row in rows.values()])
        _gains(args, settings, study, "nats a token", "+.4f", streaming.text_gains(rows, settings.seed))
    if settings.samples:
        lengths = rows["full"].needle_tokens
        columns = [f"{task.removeprefix('niah_')}, {tokens:.0f} tokens" for task, tokens in lengths.items()]
        print_table("needles found, %", ("method", "x smaller", *columns),
                    [(row.spec, f"{row.smaller:.2f}", *(f"{sum(own) / len(own):.0f}" for own in row.needles.values()))
                     for row in rows.values()])
        _gains(args, settings, "needles", "points", "+.1f", streaming.needle_gains(rows, settings.seed))


def _tasks(args) -> tuple[str, ...]:
    from lowrank_kv_jax.evals.studies.streaming.shifted_texts import SHIFTED, TASKS, text_of

    if args.tasks is None:
        return TASKS
    named = [name for task in args.tasks for name in (SHIFTED if task == "shifted" else (task,))]
    for task in named:
        if task not in TASKS:
            text_of(task)  # told before anything is measured
    return tuple(dict.fromkeys(named))


def _gains(args, settings, study: str, unit: str, form: str, gains) -> None:
    def cells(won):
        low, high = (won.low, won.high)
        drawn = "" if low is None else f"[{low:{form}}, {high:{form}}]"
        return f"{won.won}/{won.of}", "" if won.p is None else f"{won.p:.4f}", f"{won.effect:+.2f}", drawn

    tests = ("p", "effect", "95% of the mean")
    print_table(f"gain in {unit}; two-sided Wilcoxon, rank-biserial effect and bootstrap, over tasks and over the "
                "samples of all tasks",
                ("method", "over", "at", "gain", "tasks won", *tests, "least p", "median", "samples won", *tests),
                [(g.spec, g.over, g.why, f"{g.mean:{form}}", *cells(g.by_task), f"{g.by_task.least:.4f}",
                  f"{g.median:{form}}", *cells(g.by_sample)) for g in gains], texts=3)
    append(args, f"gain-{study}", settings.context, map(dataclasses.asdict, gains))


def _reconstruction(args, model, settings) -> None:
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
    from lowrank_kv_jax.cli.options import WINDOW
    from lowrank_kv_jax.evals.asking.methods import bases_of, moments_of, parse_methods
    from lowrank_kv_jax.evals.studies.streaming.quality import ENDS, ablation_specs
    from lowrank_kv_jax.evals.studies.streaming.reconstruction import hidden_updates, means, reconstruction
    from lowrank_kv_jax.evals.studies.streaming.shifted_texts import CALIBRATE, CODE, PROSE

    own = [spec for rank in settings.ranks for spec in (f"palu:rank={rank},{ENDS}", *ablation_specs(rank)[2:4])]
    methods = parse_methods(args.methods or own)
    corpus, length = load_corpus(CALIBRATE), min(WINDOW, model.config.context)
    moments = moments_of(model, methods, corpus, seed=args.seed)
    bases = bases_of(model, methods, corpus, seed=args.seed, dtype="float32")
    texts = {name: token_windows(model.tokenizer, load_corpus(source).texts, length, 1, args.seed)
             for name, source in (("prose", PROSE), ("code", CODE))}
    rows = reconstruction(model, methods, bases, texts, progress=True)

    def lines(found, first):
        return [(row.spec, row.text, row.side, *first(row),
                 *(f"{value:.4f}" for value in (row.cosine, row.explained, row.lost))) for row in found]

    names = ("cosine", "explained variance", "lost energy")
    print_table("reconstruction, means over layers", ("method", "text", "side", *names),
                lines(means(rows), lambda row: ()))
    worst = f"rank={min(settings.ranks)}"
    shown = [row for row in rows if worst in row.spec and row.text == "code" and row.side == "v" and row.layer % 3 == 0]
    print_table("values of code by layer", ("method", "text", "side", "layer", *names),
                lines(shown, lambda row: (str(row.layer),)))
    hidden = hidden_updates(model, moments, texts["code"][0], min(settings.ranks))
    print_table("equation 15 on hidden states, the encoder alone moved: lost energy of code",
                ("side", "scale", "eta", "lost"),
                [(h.side, h.scale, f"{h.eta:g}", "diverged" if h.lost is None else f"{h.lost:.4f}") for h in hidden])
    append(args, "reconstruction", length, map(dataclasses.asdict, rows))
    append(args, "hidden", length, [{"spec": "streamingkv", **dataclasses.asdict(row)} for row in hidden])


def _compared(args, model) -> list[Any]:
    """Tokens of each of --corpora."""
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
    from lowrank_kv_jax.calibration.fisher import FisherSample

    length = min(FisherSample().length, model.config.context)
    return [token_windows(model.tokenizer, load_corpus(name).texts, length, 4 * args.windows, args.seed, corpus=name)
            for name in args.corpora]


def _fisher(args, model, tokens) -> None:
    from lowrank_kv_jax.calibration.fisher import collect_fisher
    from lowrank_kv_jax.evals.studies.streaming.fisher_overlap import fisher_overlap, plot_overlap

    pair = [collect_fisher(model, own, progress=True) for own in tokens]
    overlap = fisher_overlap(model, pair[0], pair[1], args.bands)
    print_table(f"Fisher overlap of {args.corpora[0]} and {args.corpora[1]}, means over layers",
                ("projection", *(f"band {i + 1}" for i in range(args.bands))),
                [(f"W_{side}", *(f"{x:.3f}" for x in rows.mean(0))) for side, rows in overlap.items()])
    information = pair[0].information
    share = information / information.sum()
    print_table("share of the Fisher information, % of the whole", ("layers", "W_k", "W_v"),
                [(f"{i}-{i + 4}", *(f"{100 * x:.1f}" for x in share[i : i + 5].sum(0))) for i in range(0, len(share), 5)])
    if args.plot:
        path = figure_of(args, "fisher")
        plot_overlap(path, overlap, f"{model.name}: {args.corpora[0]} and {args.corpora[1]}")
        print(f"drew {path}")
    append(args, "fisher-overlap", tokens[0].shape[1],
           [{"spec": "palu", "side": side, "overlap": rows.tolist(), "corpora": args.corpora}
            for side, rows in overlap.items()])


def _speed(args, model) -> None:
    from lowrank_kv_jax.evals.studies.streaming.speed import streaming_speed

    rank = min(args.ranks)
    specs = ("full", f"palu:rank={rank}", f"streamingkv:rank={rank}")
    rows = streaming_speed(model, specs, args.timed_length, rank, rounds=args.rounds)
    full, palu, _ = rows
    print_table(f"decoding after {args.timed_length} tokens, float32 caches",
                ("method", "ms a step", "floor, ms", "x floor", "of Palu's throughput", "of the full cache's", "MiB"),
                [(r.spec, f"{1e3 * r.step:.2f}",
                  *(("", "") if r is full else (f"{1e3 * r.floor:.2f}", f"{r.step / r.floor:.2f}")),
                  f"{palu.step / r.step:.3f}", f"{full.step / r.step:.3f}", f"{r.cache_bytes / 2**20:.1f}")
                 for r in rows])
    append(args, "streaming-speed", args.timed_length, map(dataclasses.asdict, rows))
