"""`lowrank-kv eviction`: what eviction costs, what it saves, and what the moments of the evicted recover."""

import argparse
import dataclasses

from lowrank_kv_jax.cli.options import add_model_options, append_records
from lowrank_kv_jax.cli.tables import print_table

HELP = "what eviction costs and saves, and what the moments of the evicted recover"
STUDIES = ("error", "precision", "ablation", "bytes", "ojakv", "speed", "tasks")
PROTOCOLS = ("query-aware", "query-agnostic")
"""Of tasks, the first by default."""
THOUSANDTHS = "{:.3f}".format


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser(
        "eviction", help=HELP,
        description="error: ||f - f_R|| / ||f|| in each layer, and what is left of it with moments (MomentKV, figures 2 "
                    "and 3). precision: moments in 16 bits after many evictions. ablation: perplexity and needles of "
                    "MomentKV without and with its parts. bytes: rules at equal bytes, with statistics. ojakv: table 6 "
                    "of OjaKV. speed: decode steps and attention alone. tasks: RULER or LongBench by budget, under any "
                    "protocol, with the share of Ada-KV's gap that is closed (MomentKV, tables 1 to 4 and 7).",
    )
    add_model_options(parser)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES[:-1]), help="(all but tasks)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--budgets", nargs="+", type=int, default=[64, 128, 256, 512], metavar="N",
                        help="tokens a kv head keeps (64 128 256 512)")
    parser.add_argument("--windows", type=int, default=4, help="texts for errors and perplexity (%(default)s)")
    parser.add_argument("--evictions", nargs="+", type=int, default=[512, 4096, 100_000], metavar="N",
                        help="tokens evicted when the precision is measured (512 4096 100000)")
    parser.add_argument("--depths", type=int, default=4, help="of needles (%(default)s)")
    parser.add_argument("--samples", type=int, default=2,
                        help="needles at each depth, 0 for none; of tasks: samples of each task (%(default)s)")
    parser.add_argument("--protocol", choices=PROTOCOLS,
                        help=f"of tasks: compress before the question is seen, or with it ({PROTOCOLS[0]})")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK",
                        help="which, of RULER (ruler-6) or LongBench (all); with --studies tasks")
    parser.add_argument("--longbench", metavar="DIR",
                        help="tasks from files in LongBench's format instead of RULER; with --studies tasks")
    parser.add_argument("--timed-length", type=int, default=4096, metavar="N",
                        help="context in which decoding is timed (%(default)s)")
    parser.add_argument("--timed-budget", type=int, default=256, metavar="N", help="budget there (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one that compiles (%(default)s)")
    parser.add_argument("--seed", type=int, default=0,
                        help="of needles, tasks and the texts of error, precision and speed; perplexities are of the "
                             "first texts at every seed (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="append records; scores that it holds are not computed again")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ValueError, OSError: as `load_model` and the evaluations.
    """
    from lowrank_kv_jax.cli.options import check_numbers, check_outputs, device_line, load_from
    from lowrank_kv_jax.evals.studies.eviction import run as eviction

    settings = eviction.Settings(args.length, tuple(args.budgets), args.windows, depths=args.depths,
                                 samples=args.samples, seed=args.seed)
    check_numbers(args, evictions=1, timed_length=1, timed_budget=1, rounds=1, seed=0)
    check_outputs(args)
    _check_studies(args)
    _check_methods(args)
    model = load_from(args)
    _check_lengths(args, model, settings)
    if "error" in args.studies:
        _errors(args, model, settings)
    if "precision" in args.studies:
        _precision(args, model, settings)
    scored = {study: eviction.study_specs(model, study, settings) for study in args.studies if study in eviction.SCORED}
    if scored:  # in one go: a prompt is prefilled once for all methods of all studies
        specs = [spec for own in scored.values() for spec in own]
        rows = eviction.scores(model, specs, settings, json=args.json, progress=True)
        for study, own in scored.items():
            _print_scores(study, [rows[spec] for spec in own])
    if "speed" in args.studies:
        _speed(args, model)
    if "tasks" in args.studies:
        _tasks(args, model, settings)
    print(device_line())
    return 0


def _check_studies(args) -> None:
    """Refuse options that none of the studies reads, and sizes that one of them cannot take."""
    from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK

    if "tasks" not in args.studies:
        for name in ("tasks", "longbench", "protocol"):
            given = getattr(args, name)
            if given not in (None, []):
                shown = " ".join(given) if isinstance(given, list) else given
                raise ValueError(f"--{name} {shown}: is of the study tasks alone; give --studies tasks too")
    elif args.samples < 1:
        raise ValueError(f"--samples {args.samples}: must be at least 1 for --studies tasks")
    if "precision" in args.studies and args.length < DEFAULT_BLOCK:
        raise ValueError(f"--length {args.length}: must be at least {DEFAULT_BLOCK} for --studies precision, which "
                         "evicts so many tokens at a time")


def _check_methods(args) -> None:
    """Refuse now a budget, a task or its file that a later study would, after others have measured for minutes."""
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.longbench import all_tasks, find_task, load_samples
    from lowrank_kv_jax.evals.ruler.tasks import expand_tasks
    from lowrank_kv_jax.evals.studies.eviction.run import ablation_specs, error_specs
    from lowrank_kv_jax.evals.studies.eviction.speed import timed_specs
    from lowrank_kv_jax.evals.studies.eviction.tasks import specs_of

    specs = {
        "error": error_specs(args.budgets), "ablation": [s for budget in args.budgets for s in ablation_specs(budget)],
        "bytes": [f"momentkv:budget={budget}" for budget in args.budgets], "speed": timed_specs(args.timed_budget),
        "tasks": specs_of(args.budgets),
    }
    for study in args.studies:
        parse_methods(list(dict.fromkeys(specs.get(study, ()))))
    if "tasks" in args.studies and args.longbench is None:
        expand_tasks(args.tasks)
    elif "tasks" in args.studies:
        for name in args.tasks or all_tasks():
            load_samples(find_task(name).name, args.longbench, 1)


def _check_lengths(args, model, settings) -> None:
    """The same of lengths beyond the model's context, and of a model without a layer to measure."""
    from lowrank_kv_jax.cli.options import check_context
    from lowrank_kv_jax.evals.studies.eviction.error import measured_layers
    from lowrank_kv_jax.evals.studies.eviction.run import SCORED
    from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK

    if "error" in args.studies:
        measured_layers(model.config)
    behind = {"error": DEFAULT_BLOCK, "precision": 0, "tasks": 0, **dict.fromkeys(SCORED, settings.scored)}
    for study in args.studies:
        check_context(args, model, **({"timed_length": 0} if study == "speed" else {"length": behind[study]}))
    if "speed" in args.studies and args.timed_length <= 2 * DEFAULT_BLOCK:
        raise ValueError(f"--timed-length {args.timed_length}: must be above the {2 * DEFAULT_BLOCK} decode steps")


def _errors(args, model, settings) -> None:
    from lowrank_kv_jax.evals.studies.eviction import run as eviction
    from lowrank_kv_jax.evals.studies.eviction.error import average, measured_layers

    measured, layers = measured_layers(model.config), model.config.num_layers
    if len(measured) < layers:
        print(f"eviction error: of {len(measured)} of {layers} layers; the others slide a window and are left out")
    by_text = eviction.errors_by_text(model, settings)
    rows = average(by_text)
    columns = {"mass": lambda r: r.mass, "cos f_E f_R": lambda r: r.angle, "error": lambda r: r.error}
    columns |= {f"order {o}": lambda r, o=o: r.corrected[o] for o in ("0", "1", "gaussian")}
    columns |= {f"cos f^ f, {o}": lambda r, o=o: r.cosine[o] for o in ("0", "1")}
    columns |= {f"log Z^/Z, {o}": lambda r, o=o: r.partition[o] for o in ("1", "gaussian")}

    def lines(found, first):
        return [(*first(row), *(THOUSANDTHS(value(row)) for value in columns.values())) for row in found]

    print_table("eviction error, means over layers", ("method", *columns),
                lines(eviction.means(rows).values(), lambda row: (row.spec,)))
    least = eviction.error_specs([min(settings.budgets)])
    print_table(f"eviction error by layer, budget {min(settings.budgets)}", ("method", "layer", *columns),
                lines([row for row in rows if row.spec in least], lambda row: (row.spec, str(row.layer))))
    each = [eviction.means(own) for own in by_text]
    print_table(f"eviction error by text, budget {min(settings.budgets)}",
                ("method", "text", "error", "order 0", "order 1"),
                [(spec, str(i), *(THOUSANDTHS(x) for x in (own[spec].error, own[spec].corrected["0"],
                                                           own[spec].corrected["1"])))
                 for spec in least for i, own in enumerate(each)])
    _append(args, "eviction-error", settings.length, settings.windows, map(dataclasses.asdict, rows))


def _precision(args, model, settings) -> None:
    from lowrank_kv_jax.evals.studies.eviction import run as eviction

    rows = eviction.precision_table(model, settings, args.evictions, progress=True)
    print_table("moments in 16 bits against float32, means over layers, heads and queries",
                ("dtype", "order", "evictions", "|log Z^ - log Z^_32|", "||f^ - f^_32|| / ||f^_32||"),
                [(row.dtype, row.order, str(row.evictions), f"{row.lse:.4f}", f"{row.output:.4f}") for row in rows])
    _append(args, "eviction-precision", max(args.evictions), 1, map(dataclasses.asdict, rows))


def _tasks(args, model, settings) -> None:
    from lowrank_kv_jax.evals.studies.eviction.tasks import task_table

    tasks, protocol = args.tasks or ([] if args.longbench else ["ruler-6"]), args.protocol or PROTOCOLS[0]
    rows = task_table(model, settings, tasks, protocol, args.longbench, args.json, True)
    names = list(rows[0].by_task)
    print_table(f"tasks, {protocol}", ("method", "part", *names, "mean", "recovery, %", "x smaller"), [
        (row.spec, row.part, *(f"{row.by_task[name]:.0f}" for name in names), f"{row.score:.1f}",
         "" if row.recovery is None else f"{row.recovery:.0f}", f"{row.full_cache_bytes / row.cache_bytes:.2f}")
        for row in rows])


def _print_scores(study: str, rows) -> None:
    from lowrank_kv_jax.evals.studies.eviction.run import NOMINAL

    lines = []
    for row in rows:
        nominal = NOMINAL.get(row.spec) if study == "ojakv" else None
        lines.append((row.spec, "" if nominal is None else f"{100 * nominal:.0f}",
                      f"{100 * row.cache_bytes / row.full_bytes:.1f}", f"{row.perplexity:.3f}",
                      "" if row.needle is None else f"{row.needle:.0f}"))
    print_table(study, ("method", "nominal bytes, %", "bytes of full, %", "perplexity", "needles, %"), lines)


def _speed(args, model) -> None:
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.studies.eviction.speed import eviction_speed, timed_specs

    methods = parse_methods(timed_specs(args.timed_budget))
    rows = eviction_speed(model, methods, args.timed_length, rounds=args.rounds, seed=args.seed)
    full, snapkv = rows[:2]
    lines = [(row.spec, f"{row.step_ms:.2f}", f"{full.step_ms / row.step_ms:.2f}", f"{row.step_ms / snapkv.step_ms:.3f}",
              f"{row.least_ms:.2f}", f"{row.least_ms / snapkv.least_ms:.3f}",
              f"{row.attention_ms:.3f}", f"{full.attention_ms / row.attention_ms:.1f}", f"{row.attention_least_ms:.3f}",
              str(row.cache_bytes), str(row.predicted_bytes)) for row in rows]
    print_table(f"decoding in a context of {args.timed_length} tokens, float32 caches; medians, and the fastest round",
                ("method", "ms a step", "x full's speed", "of SnapKV's time", "least ms", "of SnapKV's",
                 "attention alone, ms", "x full's speed", "least ms", "bytes", "predicted"), lines)
    _append(args, "eviction-speed", args.timed_length, args.rounds,
            (dataclasses.asdict(row) | {"decode_tokens_per_s": 1e3 / row.step_ms} for row in rows))


def _append(args, task: str, length: int, samples: int, rows) -> None:
    append_records(args, "eviction", rows, model=args.model, task=task, length=length, samples=samples, seed=args.seed,
                   protocol="query-agnostic")
