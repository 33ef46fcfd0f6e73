"""Answers from a cache."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from suites import Loaded

from lowrank_kv_jax.evals.asking.answer import answer
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.methods.parse import parse_method


def test_logits_that_are_nan_are_told(capsys):
    """Nothing else would tell such a cache from one that finds nothing."""
    model = Loaded()
    for poison, told in ((1.0, ""), (math.nan, "full: logits behind a question are NaN")):
        params = jax.tree.map(lambda x, by=poison: by * x, model.params)
        cache, _ = prefill("full", model.config, model.params, jnp.ones((1, 16), jnp.int32), capacity=32)
        answer(parse_method("full"), dataclasses.replace(model, params=params), cache, [[1] * 4], 1)
        heard = capsys.readouterr().err
        assert told in heard if told else heard == ""
