"""`lowrank-kv cross-layer`: what the caches of different layers share, and what sharing a basis costs."""

import argparse
import dataclasses
import statistics
from typing import Any

from lowrank_kv_jax.cli.options import add_model_options, append_records
from lowrank_kv_jax.cli.tables import print_table

HELP = "what the layers' caches share (CKA, cosine, ranks), and what sharing a basis costs"
COST_METHODS = (
    "xkv:group=1", "xkv:group=2", "xkv:group=5", "xkv:group=5,bits=8,basis_dtype=int8",
    "xkv:group=5,rank=0.1,bits=8,basis_dtype=int8",
)
REPLACED = {
    **dict.fromkeys(("quality", "sides"), ("text", "length", "energy", "latents", "costs", "plot")),
    "latents": ("groups", "energy", "costs"),
}
"""What is not read where an option is given."""
NEEDED = {
    "methods": ("quality",), **dict.fromkeys(("cost_length", "rounds"), ("costs",)),
    **dict.fromkeys(("ratios", "fields", "samples", "windows"), ("quality", "sides")),
}
"""What is not read where none of other options is given."""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("cross-layer", help=HELP, description=HELP)
    add_model_options(parser)
    parser.add_argument("--text", nargs="+", metavar="TEXT",
                        help="what to read, as for `calibrate --corpus`; by default Python's language reference")
    parser.add_argument("--length", type=int, default=2048, help="tokens read (%(default)s)")
    parser.add_argument("--seed", type=int, default=0,
                        help="shifts where reading starts; with --quality and --sides it is of the needles (%(default)s)")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 3, 5, 6], metavar="G",
                        help="group sizes (%(default)s)")
    parser.add_argument("--energy", type=float, default=0.95, help="share that ranks must keep (%(default)s)")
    parser.add_argument("--latents", type=float, metavar="R",
                        help="instead of the analyses: how alike adjacent layers are to MiniCache, as keys, values, and "
                             "coefficients of a share R of their columns")
    parser.add_argument("--costs", nargs="*", metavar="SPEC",
                        help="also show prompt lengths from which these methods pay, time of the fit at prefill and of "
                             "decoding against its floor; without a SPEC, those of a few xkv configurations")
    parser.add_argument("--cost-length", type=int, default=4096, help="tokens of the timed prompts (%(default)s)")
    parser.add_argument("--quality", nargs="+", type=int, metavar="N",
                        help="instead of the analyses: needles and perplexity at these lengths, every group size and "
                             "ratio at equal bytes, beside Full and MiniCache")
    parser.add_argument("--methods", nargs="+", metavar="SPEC", help="for --quality, instead of that grid")
    parser.add_argument("--sides", nargs="+", type=int, metavar="N",
                        help="instead of the analyses: the same with keys alone, and values alone, compressed")
    parser.add_argument("--ratios", nargs="+", type=float, default=[2.5, 4.0, 8.0], metavar="R",
                        help="times smaller (%(default)s)")
    parser.add_argument("--samples", type=int, default=6, help="needles of each task (%(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="texts for the perplexity (%(default)s)")
    parser.add_argument("--fields", default="",
                        help="further fields of the compared methods, e.g. bits=8,basis_dtype=int8")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append records")
    parser.add_argument("--plot", metavar="PNG",
                        help="draw figure 2 of the xKV paper for this model, or what --latents compares")
    options = {*NEEDED, *REPLACED, *sum(REPLACED.values(), ())}
    parser.set_defaults(run=run, usual={name: parser.get_default(name) for name in options})
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_model`, `load_corpus`, `analyse`, `pair_similarity`, `parse_method`.
    """
    from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
    from lowrank_kv_jax.cli.options import check_context, check_numbers, check_outputs, load_from
    from lowrank_kv_jax.evals.asking.methods import check_methods, parse_methods
    from lowrank_kv_jax.evals.studies.cross_layer.analysis import analyse
    from lowrank_kv_jax.evals.studies.cross_layer.cost import STEPS, ranks_of

    least = dict.fromkeys(("length", "groups", "cost_length", "quality", "sides", "samples", "windows", "rounds"), 1)
    check_numbers(args, **least, seed=0)
    check_outputs(args)
    _check_read(args)
    costs = {} if args.costs is None else parse_methods(args.costs or COST_METHODS)
    parse_methods(args.methods or ())
    model = load_from(args)
    check_context(args, model, quality=0, sides=0)
    if args.quality or args.sides:
        return _quality(args, model)
    corpus = load_corpus(args.text)
    check_methods(model, costs, "cross-layer")
    check_context(args, model, length=0, **({"cost_length": STEPS} if costs else {}))
    ranks_of(costs, model.config.attention, args.cost_length)  # told now, not after the analyses
    tokens = token_windows(model.tokenizer, corpus.texts, args.length, 1, args.seed, name="--length ")[0]
    if args.latents is not None:
        return _latents(args, model, tokens, corpus.name)
    analysis = analyse(model, tokens, args.groups, args.energy)
    _print_analysis(analysis, model.name, corpus.name)
    records = _analysis_records(analysis)
    if costs:
        records += _costs(model, costs, args.cost_length, args.rounds)
    if args.plot:
        from lowrank_kv_jax.evals.studies.cross_layer.plot import plot_analysis

        plot_analysis(args.plot, analysis, f"{model.name} on {corpus.name}, {args.length} tokens")
        print(f"drew {args.plot}")
    append_records(args, "cross-layer", records, model=model.name, length=args.length, seed=args.seed,
                   corpus=corpus.name)
    return 0


def _check_read(args: argparse.Namespace) -> None:
    """Refuse options that change nothing beside the others; one that is given its default passes."""
    given = {name: value for name, usual in args.usual.items() if (value := getattr(args, name)) != usual}
    for by, names in REPLACED.items():
        for name in names:
            if by in given and name in given:
                raise ValueError(f"{_shown(name, given[name])}: is not read with --{by}; leave one of the two out")
    for name, others in NEEDED.items():
        if name in given and not any(other in given for other in others):
            needed = " or ".join(f"--{other}" for other in others)
            raise ValueError(f"{_shown(name, given[name])}: is not read without {needed}; give that too, or leave it out")
    if args.methods and not args.sides:
        for name in ("groups", "ratios", "fields"):
            if name in given:
                raise ValueError(f"{_shown(name, given[name])}: is not read with --methods; leave one of the two out")


def _shown(name: str, value: Any) -> str:
    """An option as it was given."""
    values = value if isinstance(value, list) else [value]
    return " ".join([f"--{name.replace('_', '-')}", *map(str, values)])


def _latents(args: argparse.Namespace, model, tokens, corpus: str) -> int:
    """Measure and print what MiniCache would find in keys, values and latents."""
    from lowrank_kv_jax.evals.studies.cross_layer.latents import pair_similarity
    from lowrank_kv_jax.evals.studies.cross_layer.plot import plot_pairs

    rows = pair_similarity(model, tokens, args.latents)
    fields = ("cosine", "lost", "turned", "turned_lost", "cka")
    means = {row.what: {field: statistics.fmean(getattr(row, field)) for field in fields} for row in rows}
    upper = {row.what: statistics.fmean(row.cosine[len(row.cosine) // 2 :]) for row in rows}
    print_table(f"{model.name} on {corpus}, {len(tokens)} tokens: adjacent layers",
                ("vectors", "width", "cosine", "upper half", "lost in a merge", "cosine, turned", "lost, turned", "CKA"),
                [(row.what, str(row.width), f"{mean['cosine']:.3f}", f"{upper[row.what]:.3f}",
                  *(f"{mean[field]:.3f}" for field in fields[1:])) for row in rows for mean in (means[row.what],)])
    if args.plot:
        plot_pairs(args.plot, rows, f"{model.name} on {corpus}, {len(tokens)} tokens: adjacent layers")
        print(f"drew {args.plot}")
    records = [{"task": f"adjacent {row.what}", "rank": args.latents, **dataclasses.asdict(row)} for row in rows]
    append_records(args, "cross-layer", records, model=model.name, length=args.length, seed=args.seed, corpus=corpus)
    return 0


def _quality(args: argparse.Namespace, model) -> int:
    """Measure and print what methods keep at equal bytes, and with one side compressed."""
    from lowrank_kv_jax.evals.studies.cross_layer import quality as study

    settings = study.Settings(
        tuple(args.ratios), tuple(args.groups), args.samples, args.windows, seed=args.seed, fields=args.fields
    )
    spec = model.config.attention
    runs = [("equal bytes", n, args.methods or study.equal_bytes_specs(settings)) for n in args.quality or ()]
    runs += [("one side", n, study.one_sided_specs(spec, settings, n)) for n in args.sides or ()]
    for title, length, specs in runs:
        rows = study.quality(model, specs, settings, length, json=args.json, progress=True)
        print_table(f"{title}, {length} tokens", ("method", "smaller", *study.NEEDLES, "needles %", "perplexity"),
                    [(row.spec, f"{row.smaller:.2f}", *(f"{row.needles[task]:.0f}" for task in study.NEEDLES),
                      f"{row.needle:.0f}", f"{row.perplexity:.2f}") for row in rows])
    return 0


def _print_analysis(analysis, model: str, corpus: str) -> None:
    print_table(f"{model} on {corpus}: adjacent layers", ("side", "CKA", "token-wise cosine"),
                [(side, *(f"{value:.3f}" for value in analysis.neighbours(side))) for side in analysis.cka])
    sizes = next(iter(analysis.ranks.values()))
    print_table(f"Rank for {analysis.energy:.0%} of the energy, % of the width", ("layers of a group", *analysis.ranks),
                [(str(size), *(f"{100 * analysis.rank_ratio(side, size):.1f}" for side in analysis.ranks))
                 for size in sizes])
    for size in sizes if "keys" in analysis.ranks else ():
        print(f"xkv:group={size},table={analysis.table(size)}")


def _analysis_records(analysis) -> list[dict]:
    records = []
    for side in analysis.cka:
        cka, cosine = analysis.neighbours(side)
        records.append({
            "task": f"similarity of {side}", "adjacent_cka": cka, "adjacent_cosine": cosine,
            "cka": analysis.cka[side].tolist(), "cosine": analysis.cosine[side].tolist(),
        })
        for size, found in analysis.ranks[side].items():
            records.append({
                "task": f"ranks of {side}", "group": size, "energy": analysis.energy,
                "rank_ratio": analysis.rank_ratio(side, size), "ranks": [rank for rank, _ in found],
            })
    return records


def _costs(model, methods, length: int, rounds: int) -> list[dict]:
    """Print and return what each method costs."""
    from lowrank_kv_jax.evals.studies.cross_layer.cost import break_even, measure_costs, smaller_at

    spec, records, sizes, times = model.config.attention, [], [], []
    costs = measure_costs(model, methods, length, rounds=rounds)
    for name, method in methods.items():
        fixed = getattr(method, "smaller", None) is None
        pays = [break_even(method, spec, ratio) if fixed else None for ratio in (1.0, 2.0, 4.0)]
        cost, smaller = costs[name], smaller_at(method, spec, length)
        sizes.append((name, f"{smaller:.2f}", *("-" if p is None else str(p) for p in pays)))
        times.append((
            name, f"{100 * cost.overhead:.1f}", f"{1e3 * cost.decode:.1f}", f"{1e3 * cost.floor:.1f}",
            f"{cost.decode / cost.floor:.2f}", f"{1e3 * cost.full_decode:.1f}",
        ))
        records.append({
            "task": "cost", "method": name, "length": length, "smaller": smaller,
            "break_even": dict(zip(("1", "2", "4"), pays, strict=True)), "ttft_s": cost.ttft,
            "fit_overhead": cost.overhead, "decode_tokens_per_s": 1 / cost.decode, "decode_s": cost.decode,
            "floor_s": cost.floor, "layers_s": cost.layers, "full_decode_s": cost.full_decode, "flops": cost.flops,
            "bytes": cost.bytes, "matmul_rate": cost.matmul_rate, "copy_rate": cost.copy_rate,
        })
    print_table("From which prompt length it pays, tokens",
                ("method", f"x smaller at {length}", "1x from", "2x from", "4x from"), sizes)
    print_table(f"Time at {length} tokens",
                ("method", "fit, % of prefill", "decode, ms", "floor, ms", "x floor", "full, ms"), times)
    here = next(iter(costs.values()))
    print(f"layers without attention {1e3 * here.layers:.1f} ms, products {here.matmul_rate / 1e9:.0f} GFLOP/s, "
          f"copies {here.copy_rate / 1e9:.0f} GB/s")
    return records
