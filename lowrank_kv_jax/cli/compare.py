"""`lowrank-kv compare`: what each method costs and keeps, beside the full cache."""

import argparse

HELP = "what each method costs and keeps, beside the full cache"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    from lowrank_kv_jax.cli.options import add_model_options
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES, default_cache_dtype

    parser = subparsers.add_parser(
        "compare", help=HELP,
        description="For each method: retrieval of a needle and perplexity of text through a cache that was "
                    "compressed before the question was seen, its bytes, and its speed.",
    )
    add_model_options(parser)
    parser.add_argument("--methods", nargs="+", metavar="SPEC",
                        help="e.g. full ojakv:rank=0.5, or `all` for every method with its defaults")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], metavar="N",
                        help="tokens of the needle samples (1024 2048)")
    parser.add_argument("--samples", type=int, default=8, help="needles at each length (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of needles and texts (%(default)s)")
    parser.add_argument("--calibrate", nargs="+", metavar="TEXT",
                        help="what bases are fitted to: files, built-in names, hub datasets; by default the "
                             "first half of Python's language reference")
    parser.add_argument("--text", nargs="+", metavar="TEXT",
                        help="what perplexity is measured on; by default the second half")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default=default_cache_dtype(),
                        help="of the caches whose quality and bytes are measured (%(default)s)")
    parser.add_argument("--prefill-chunk", type=int, metavar="N",
                        help="read contexts N tokens at a time and compress between them; by default as a whole")
    parser.add_argument("--timed-length", type=int, metavar="N",
                        help="tokens of the prompt that is timed; by default the shortest length")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (%(default)s)")
    parser.add_argument("--json", metavar="FILE",
                        help="append one JSON object for each method and sample, at the end: each holds the method's "
                             "times, which are measured last")
    parser.add_argument("--plot", metavar="PNG", help="draw quality against bytes")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write what was asked for.

    Raises:
        ValueError, OSError: as `load_model`, `parse_methods`, `load_corpus` and `compare`.
    """
    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.cli.options import check_outputs, corpus_of, load_from
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.compare.run import Settings, compare, records, work
    from lowrank_kv_jax.evals.results.records import append_record
    from lowrank_kv_jax.progress import ProgressBar

    methods = parse_methods(args.methods)
    settings = Settings(
        lengths=tuple(args.lengths), samples=args.samples, seed=args.seed, rounds=args.rounds,
        timed_length=args.timed_length, prefill_chunk=args.prefill_chunk,
        dtype=args.cache_dtype, calibrate=corpus_of(args.calibrate, "pydoc:first"),
        text=corpus_of(args.text, "pydoc:second"),
    )
    check_outputs(args)
    for corpus in (settings.calibrate, settings.text):
        load_corpus(corpus)  # what is not there is said before a model is loaded
    model = load_from(args)
    with ProgressBar("compare", work(methods, settings), shown=True) as bar:
        def step(name: str, done: float) -> None:
            bar.advance(done, f"compare, {name}")

        results = compare(model, methods, settings, step, progress=True)
    if args.json:
        for record in records(model, results, settings):
            append_record(args.json, record)
    if args.plot:
        from lowrank_kv_jax.evals.compare.plot import plot_results

        plot_results(results, args.plot, f"{model.name}: quality against the bytes of the cache")
    _print(model, results, settings)
    return 0


def _print(model, results, settings) -> None:
    """The table and what its columns mean."""
    from lowrank_kv_jax.cli.options import device_line
    from lowrank_kv_jax.cli.tables import print_table

    longest, lengths, timed = max(settings.lengths), settings.lengths, settings.length_timed
    heads = ["method", *(f"needle\n{n}, %" for n in lengths), "text\nppl", f"KiB/tok\n{longest}", f"MiB\n{longest}"]
    heads += [f"x smaller\n{what}" for what in ("stored", "bases apart", "nominal")]
    heads += [f"TTFT\n{timed}, s", f"decode\n{timed}, tok/s"]
    lines = []
    for result in results:
        size = result.size[longest]
        nominal = "fixed" if size.nominal_smaller is None else f"{size.nominal_smaller:.2f}"
        lines.append((
            result.spec, *(f"{result.needle[n]:.0f}" for n in lengths), f"{result.perplexity.ppl:.2f}",
            f"{size.per_token / 1024:.1f}", f"{size.total / 2**20:.1f}", f"{size.smaller:.2f}",
            f"{size.smaller_apart:.2f}", nominal,
            f"{result.timing.ttft_s:.2f}", f"{result.timing.decode_tokens_per_s:.1f}",
        ))
    print_table(f"{model.name}, context compressed before the question is seen", heads, lines)
    print(_caption(settings, model.config.context, results[0].perplexity.nll.size, device_line()), flush=True)


def _caption(settings, context: int, scored: int, device: str) -> str:
    chunks = f"contexts are read {settings.prefill_chunk} tokens at a time. " if settings.prefill_chunk else ""
    return (
        f"{chunks}needle: {settings.samples} samples a length, greedy. text: perplexity of {scored} tokens, scored "
        f"in blocks through the cache of {settings.prefix(context)} tokens.\n"
        f"KiB/tok, MiB, x smaller: every leaf of a {settings.dtype} cache, bases and free slots included, "
        "against a full cache in 16 bits; bases apart: without those that all requests share; nominal: of very long "
        "prompts.\n"
        f"TTFT, decode: medians of {settings.rounds} alternating rounds, one row, "
        f"{settings.cache_dtype_timed} caches for every method; {device}."
    )
