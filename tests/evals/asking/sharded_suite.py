"""Run by test_suite.py in a process of its own with 8 devices: a suite on one device and on a mesh.

Prints the number of records, and the fields in which those of the mesh differ.
"""

import jax
import suites as run
from helpers import PLAIN, model

from lowrank_kv_jax.evals.asking.suite import evaluate
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.storage.sharding import make_mesh


def main():
    mesh = make_mesh("data=2,model=4")
    params = jax.device_put(model(PLAIN).params, param_shardings(PLAIN, mesh))
    alone = run.without_times(evaluate(run.Loaded(), run.METHODS, run.some(), bases=run.fit))
    spread = run.without_times(
        evaluate(run.Loaded(params=params), run.METHODS, run.some(), bases=run.fit, mesh=mesh)
    )
    pairs = zip(alone, spread, strict=True)
    print(len(alone), sorted({name for one, other in pairs for name in one if one[name] != other[name]}))


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main()
