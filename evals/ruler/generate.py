"""`generate`: samples of any task, at any length, for any tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv_jax.evals.ruler import cwe, fwe, niah, qa, vt
from lowrank_kv_jax.evals.ruler.haystack import Essay, load_haystack
from lowrank_kv_jax.evals.ruler.samples import RulerSample, cut_prefix
from lowrank_kv_jax.evals.ruler.sizing import TooShort
from lowrank_kv_jax.evals.ruler.tasks import find_task

SEED = 42


def generate(
    task: str, tokenizer: Any, length: int, samples: int, seed: int = SEED, *,
    haystack: str | Essay | None = None,
    questions: qa.QuestionSet | None = None, more_words: Sequence[str] | None = None,
) -> list[RulerSample]:
    """The first samples of a task, equal to those of the official generator given the same inputs.

    Args:
        task: its name.
        tokenizer: as of `LoadedModel.tokenizer`; lengths are counted with it.
        length: tokens of prompt and reserved answer together, at most.
        samples: how many.
        seed: everything random follows from it.
        haystack: a text (or `Essay`) for the tasks with an essay haystack; by default Python's own language
            reference.
        questions: for the qa tasks; by default from the hub.
        more_words: see `cwe.generate`.

    Raises:
        ValueError: an unknown task, less than one sample, a negative seed, more samples than questions.
        TooShort: the length is below the task's floor (a ValueError).
        ValueError: wonderwords is not installed; FileNotFoundError: the questions cannot be loaded.
    """
    found = find_task(task)
    if samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    check_seed(seed)
    if length <= found.new_tokens:
        raise TooShort(f"length={length} is below the floor of RULER task {task!r}: its answers alone "
                       f"reserve "
                       f"{found.new_tokens} tokens")
    args, extra = (found, tokenizer, length, samples, seed), _extra(found, haystack, questions, more_words)
    module = {"niah": niah, "vt": vt, "cwe": cwe, "fwe": fwe, "qa": qa}[found.family.name]
    made = []
    for index, (prompt, outputs, tokens) in enumerate(module.generate(*args, **extra)):
        text, prefix = cut_prefix(task, prompt)
        made.append(RulerSample(task, index, text, prefix, tuple(outputs), tokens))
    return made


def check_seed(seed: int) -> None:
    """Raise ValueError unless the official generator could draw from the seed."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: must lie in 0..{2**32 - 1}")


def _extra(task, haystack, questions, more_words) -> Mapping[str, Any]:
    """What only one family takes."""
    if task.family.name == "cwe":
        return {"more_words": more_words}
    if task.family.name == "qa":
        return {"data": questions or qa.load_questions(task.parameters["dataset"])}
    if task.family.name != "niah":
        return {}
    if task.parameters["haystack"] != "essay":
        return {"essay": Essay(())}
    if isinstance(haystack, Essay):
        return {"essay": haystack}
    return {"essay": Essay.of(load_haystack() if haystack is None else haystack)}
