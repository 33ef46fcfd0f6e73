"""RULER's metric."""

from collections.abc import Sequence

from lowrank_kv_jax.evals.ruler.tasks import find_task


def score(task: str, prediction: str, outputs: Sequence[str]) -> float:
    """Share of the references that a prediction contains, case-insensitively, 0 to 1; for qa, whether it has
    any."""
    prediction = prediction.lower()
    found = [reference.lower() in prediction for reference in outputs]
    return float(any(found)) if find_task(task).family.match == "any" else sum(found) / len(found)
