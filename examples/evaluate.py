"""Evaluate on every device there is: one CPU or GPU, several GPUs, or a TPU pod slice.

    uv run examples/evaluate.py --methods full ojakv:rank=0.6 --json results.jsonl

On a pod slice or under Slurm start the same line on every host: the processes find each other. Elsewhere tell them:
`--coordinator HOST:PORT --processes 2 --process 0` (and 1 on the other). Contexts are spread over the devices, heads too
with --model-axis N where N divides the model's kv heads. The first process writes the records; a run that was
interrupted goes on where it stopped. Then: `lowrank-kv report results.jsonl --out report`.
"""

import argparse
import os

import jax

import lowrank_kv_jax as lkv
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.results.summary import mean_scores, size_texts
from lowrank_kv_jax.evals.ruler import evaluate_ruler
from lowrank_kv_jax.storage.sharding import make_mesh


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", nargs="+", default=["full", "ojakv:rank=0.6"])
    parser.add_argument("--tasks", nargs="+", default=["ruler-6"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--rows-per-device", type=int, default=4)
    parser.add_argument("--model-axis", type=int, default=1)
    parser.add_argument("--json", default="results.jsonl")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args(argv)

    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", "") or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        jax.distributed.initialize()

    data = jax.device_count() // args.model_axis
    mesh = make_mesh(f"data={data},model={args.model_axis}") if jax.device_count() > 1 else None
    model = lkv.load_model(args.model, mesh=mesh)
    records = evaluate_ruler(
        model, parse_methods(args.methods), args.tasks, args.lengths, args.samples, json=args.json,
        rows=args.rows_per_device * data, mesh=mesh, progress=jax.process_index() == 0,
    )
    if jax.process_index() == 0:
        for method, scores in mean_scores(records).items():
            mean = sum(scores.values()) / len(scores)
            print(f"{method:30} {size_texts(records, method)[0]}x smaller, mean score {mean:.1f}")


if __name__ == "__main__":
    main()
