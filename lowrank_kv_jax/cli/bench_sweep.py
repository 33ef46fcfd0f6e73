"""`lowrank-kv bench kernels --sweep`: what a GPU makes of the kernels and of whole programs."""

import argparse
import json

from lowrank_kv_jax.cli.tables import print_table


def run_sweep(args: argparse.Namespace) -> int:
    """Both parts of the sweep, a file of JSON and a table each; 1 if a launch that is chosen by itself fails."""
    import jax

    from lowrank_kv_jax.cli.options import check_numbers, device_line
    from lowrank_kv_jax.evals.asking.methods import parse_methods
    from lowrank_kv_jax.evals.speed import kernels, steps, sweep
    from lowrank_kv_jax.files import expanded, write_text
    from lowrank_kv_jax.pallas_kernels.gpu_grid import Tuning
    from lowrank_kv_jax.storage.backend import on_gpu

    check_numbers(args, seed=0)
    if not on_gpu():
        raise ValueError(f"--sweep: needs a GPU, JAX runs on {jax.default_backend()}")
    folder = expanded(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    bandwidth, failed = kernels.copy_bandwidth(), False
    print(f"copying runs at {bandwidth / 1e9:.0f} GB/s; {device_line()}", flush=True)
    if "kernels" in args.parts:
        launches = sweep.sweep(seed=args.seed, on_program=lambda own: print(*_row(own, bandwidth), sep="; ", flush=True))
        write_text(folder / "sweep.json", json.dumps(sweep.records(launches, bandwidth, args.seed), indent=1))
        _print_launches(launches, bandwidth)
        failed |= any(launch.failure and launch.tuning == Tuning() for launch in launches)
    if "steps" in args.parts:
        methods = parse_methods(list(steps.METHODS))
        taken = steps.bench_steps(methods, seed=args.seed, on_method=lambda step: print(step, flush=True))
        write_text(folder / "steps.json", json.dumps(steps.records(taken, args.seed), indent=1))
        _print_steps(taken)
        failed |= any(step.failure for step in taken)
    return int(failed)


def _print_launches(launches, bandwidth: float) -> None:
    by_program: dict = {}
    for launch in launches:
        by_program.setdefault(launch.program, []).append(launch)
    rows = []
    for own in by_program.values():
        rows.append(_row(own, bandwidth))
        rows += [(f"  {x.way()}", "", "", "", "", f"FAILED: {x.failure[:90]}") for x in own if x.failure]
    heads = ("kernel", "xla, us", "cuDNN, us", "as it is, us", "% of copy", "otherwise, us")
    print_table("decode attention", heads, rows, texts=("kernel", "otherwise, us"))


def _row(own, bandwidth: float) -> tuple[str, ...]:
    """A program: XLA's time, the one as it is, its share of the bandwidth, and the others in order of their times."""
    by_way = {launch.way(): launch for launch in own}
    default = by_way.pop("as it is")
    beside = [by_way.pop(name, None) for name in ("xla", "cuDNN")]
    done = sorted((x for x in by_way.values() if x.seconds), key=lambda x: x.seconds)
    tried = ", ".join(f"{x.way()} {1e6 * x.seconds:.0f}" for x in done)
    rate = "" if default.seconds is None else f"{100 * default.bytes / default.seconds / bandwidth:.0f}"
    return str(default.program), *map(_micro, beside), _micro(default), rate, tried


def _micro(launch) -> str:
    return "" if launch is None or launch.seconds is None else f"{1e6 * launch.seconds:.1f}"


def _print_steps(taken) -> None:
    from lowrank_kv_jax.evals.speed import steps

    best = {step.rows: step for step in reversed(taken) if step.method == "full"}
    rows = []
    for step in taken:
        if step.failure:
            rows.append((str(step.rows), step.method, "", "", "", "", "", f"FAILED: {step.failure[:90]}"))
            continue
        full = best.get(step.rows)
        ratio = "" if full is None or full.failure else f"{full.step_s / step.step_s:.2f}"
        rows.append((str(step.rows), step.method, f"{step.prefill_s:.3f}", f"{1e3 * step.step_s:.2f}",
                     f"{1e3 * step.refresh_s:.1f}", f"{step.rows / step.step_s:.0f}", ratio,
                     f"{step.bytes / 2**30:.2f} GiB"))
    heads = ("B", "method", "prompt, s", "step, ms", "refresh, ms", "tokens/s", "x full", "cache")
    title = f"{steps.LAYERS} layers of Llama 3.1 8B, random weights, bfloat16, {steps.TOKENS} tokens a row"
    print_table(title, heads, rows, texts=("method", "cache"))
