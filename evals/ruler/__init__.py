"""RULER (Hsieh et al., 2024, https://arxiv.org/abs/2404.06654): 13 retrieval, tracing, counting and reading
tasks.

Samples are generated here, byte for byte those of the official generator (https://github.com/NVIDIA/RULER)
where it is
given the same haystack, sentence splitter, questions and tokenizer: the random streams are drawn in its
order.
"""

from lowrank_kv_jax.evals.ruler.generate import SEED, check_seed, generate
from lowrank_kv_jax.evals.ruler.haystack import Essay, load_haystack
from lowrank_kv_jax.evals.ruler.qa import QuestionSet, load_questions
from lowrank_kv_jax.evals.ruler.run import evaluate_ruler
from lowrank_kv_jax.evals.ruler.samples import RulerSample, load_task, save_task, split_context
from lowrank_kv_jax.evals.ruler.scoring import score
from lowrank_kv_jax.evals.ruler.sizing import TooShort
from lowrank_kv_jax.evals.ruler.tasks import GROUPS, RULER_6, TASKS, expand_tasks, find_task

__all__ = [
    "GROUPS", "RULER_6", "SEED", "TASKS", "Essay", "QuestionSet", "RulerSample", "TooShort", "check_seed",
    "evaluate_ruler", "expand_tasks", "find_task", "generate", "load_haystack", "load_questions", "load_task",
    "save_task", "score", "split_context",
]
