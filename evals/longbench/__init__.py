"""LongBench (Bai et al., 2024, https://arxiv.org/abs/2308.14508): its 16 English tasks, prompts and
metrics."""

from lowrank_kv_jax.evals.longbench.metrics import score
from lowrank_kv_jax.evals.longbench.run import evaluate_longbench, make_question, truncate
from lowrank_kv_jax.evals.longbench.samples import LongBenchSample, load_samples
from lowrank_kv_jax.evals.longbench.tasks import all_tasks, find_task

__all__ = [
    "LongBenchSample", "all_tasks", "evaluate_longbench", "find_task", "load_samples", "make_question",
    "score",
    "truncate",
]
