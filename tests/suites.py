"""A tiny model as the evaluations see it, and suites of questions for it."""

import dataclasses
from typing import Any

from character_tokenizer import Encoded
from helpers import PLAIN, bases_for
from helpers import model as tiny

from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.asking.prompts import Question
from lowrank_kv_jax.evals.asking.suite import Suite

METHODS = parse_methods(["full", "streamingllm:budget=24,keep=none,sinks=4", "static-pca:rank=0.5,sinks=4,recent=8"])


class Letters:
    """A tokenizer of characters that can be turned back."""

    bos_token_id = None
    chat_template = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return Encoded([ord(c) % 64 for c in text])

    def encode(self, text, add_special_tokens=True):
        return self(text).input_ids

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(64 + i) for i in ids)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What the evaluations read of a `LoadedModel`."""

    config: Any = PLAIN
    params: Any = dataclasses.field(default_factory=lambda: tiny().params)
    tokenizer: Any = dataclasses.field(default_factory=Letters)
    name: str = "tiny"
    fingerprint: str = "f" * 8


def questions(count=5, task="a", new_tokens=4):
    """Two questions on each context, of different lengths."""
    return tuple(
        Question(task, 64, i, f"{task} context {i // 2} " * (3 + i // 2), f"question {i}", "?", new_tokens,
                 lambda answer: len(set(answer)) / 8, details={"outputs": [str(i)]})
        for i in range(count)
    )


def some(protocol="query-agnostic", count=5, **settings):
    return Suite("eval test", questions(count) + questions(2, "b", 3), protocol, rows=2, seed=1,
                 settings=settings)


def without_times(records):
    drop = ("ttft_s", "decode_tokens_per_s", "peak_bytes", "methods_sharing_prefill")
    return [{name: value for name, value in record.items() if name not in drop} for record in records]


def fit(needed):
    return {spec: bases_for(method) for spec, method in needed.items() if method.calibrated}
