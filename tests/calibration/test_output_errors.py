"""Ranks by a budget for the error of each layer's output, as the code of EigenAttention has them."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, model, prompts

from lowrank_kv_jax.calibration.calibrate import fit_bases, moments_for
from lowrank_kv_jax.estimators.rank_for_output import LEAST, THRESHOLDS, ranks_for_output
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.load import LoadedModel


def test_the_rule_is_that_of_the_code():
    """A loop as it stands there: shares of singular values, steps of 0.02, back to the last threshold within the budget."""
    rng = np.random.default_rng(0)
    for budget in (1e-9, 0.02, 0.1, 1.0):
        k, v = np.sort(rng.random(16))[::-1] ** 4, -np.sort(-rng.random((3, 16)) ** 4, axis=1)
        error = np.sort(rng.random(len(THRESHOLDS)) * 0.2)
        error[0] = 0
        shares = [np.cumsum(np.sqrt(x), -1) / np.sqrt(x).sum(-1, keepdims=True) for x in (k, v)]

        def ranks(threshold, shares=shares):
            of_k, of_v = (int((x < threshold - 1e-12).sum(-1).max()) for x in shares)
            return (16, 16) if threshold == 1 else (max(of_k, 1), max(of_v, 1))

        threshold, found, at, seen = 1.0, (16, 16), 0, 0.0
        while seen < budget and min(found) > LEAST * 16:
            found, seen = ranks(threshold), error[at]
            threshold, at = round(threshold - 0.02, 10), at + 1
        assert ranks_for_output(k, v, error, budget) == ranks(min(round(threshold + 0.04, 10), 1.0))


def test_a_budget_decides_the_ranks_of_each_layer():
    """Errors are those of the layer's own output; larger budgets give smaller ranks; keys alone need no queries."""
    loaded = LoadedModel("tiny", PLAIN, model().params, None, "a" * 64)
    moments = moments_for(loaded, [parse_method("eigenattention:code")], np.asarray(prompts(2)))
    assert moments.outputs is not None
    middle = float(np.median(moments.outputs.error[:, 3]))
    methods = [parse_method(f"eigenattention:code,output_error={budget}") for budget in (1e-6, middle, 1.0)]
    assert (moments.outputs.error[:, 0] < 1e-5).all()
    tried = np.isfinite(moments.outputs.error)
    assert (np.diff(np.where(tried, moments.outputs.error, 1.0), axis=1)[:, :5] > -1e-3).all()
    of_budget = [fit_bases(loaded, method, moments, jnp.float32) for method in methods]
    columns = [sum(own.k.shape[-1] + own.v.shape[-1] for own in bases) for bases in of_budget]
    assert columns[0] > columns[1] >= columns[2]
    for own in of_budget[2]:  # the last threshold before one that leaves less than 0.45 D
        assert min(own.k.shape[-1], own.v.shape[-1]) > LEAST * PLAIN.head_dim
    with pytest.raises(ValueError, match="hold no errors of outputs"):
        methods[0].fit(PLAIN.attention, moments._replace(outputs=None))
    with pytest.raises(ValueError, match="output_error=0.1: is measured in bases of keys alone"):
        parse_method("eigenattention:output_error=0.1")
