"""Run by test_suite.py in two processes of four devices each: a suite on a mesh over all eight.

The first process writes the records to the file that is given and prints their number.
"""

import sys

import jax

PROCESS, ADDRESS, PATH = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(ADDRESS, num_processes=2, process_id=PROCESS)

import suites as run  # noqa: E402
from helpers import PLAIN, model  # noqa: E402

from lowrank_kv_jax.evals.asking.suite import evaluate  # noqa: E402
from lowrank_kv_jax.models.parameter_sharding import param_shardings  # noqa: E402
from lowrank_kv_jax.storage.sharding import make_mesh  # noqa: E402


def main():
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    mesh = make_mesh("data=2,model=4")
    params = jax.device_put(model(PLAIN).params, param_shardings(PLAIN, mesh))
    records = evaluate(run.Loaded(params=params), run.METHODS, run.some(), bases=run.fit, mesh=mesh, json=PATH)
    if PROCESS == 0:
        print(len(records))


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main()
