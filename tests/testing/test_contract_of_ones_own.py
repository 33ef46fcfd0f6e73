"""What breaks a promise is found; the library's own parts are asked in `tests/method` and `tests/estimators`."""

import dataclasses

import jax.numpy as jnp
import pytest

from lowrank_kv_jax.estimators.estimator import ESTIMATORS, SizedEstimator
from lowrank_kv_jax.method import REGISTRY
from lowrank_kv_jax.selections.budgeted import Budgeted
from lowrank_kv_jax.testing import check_estimator, check_part, exact_configuration, small_configuration
from lowrank_kv_jax.testing.promises import equals_full_attention, generates_as_step_by_step


@dataclasses.dataclass(frozen=True)
class Forgetful(Budgeted):
    """Says that it is exact at half of the prompt."""

    name = "forgetful"
    exact_at = {"keep": 0.5}

    def prompt_scores(self, layout, tap, lengths):
        return (tap.v.astype("float32") ** 2).sum(-1).swapaxes(1, 2)


def test_a_part_that_is_not_exact_where_it_says_is_found():
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        equals_full_attention(exact_configuration(Forgetful))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_part(Forgetful)


def test_a_loop_that_gives_other_tokens_is_found(monkeypatch):
    from lowrank_kv_jax.testing import promises

    method = small_configuration(REGISTRY["streamingllm"])
    out = promises.two_blocks(method, promises.PLAIN, promises.LENGTHS)
    other = dataclasses.replace(out, tokens=[[(token + 1) % 64 for token in row] for row in out.tokens])
    monkeypatch.setattr(promises, "two_blocks", lambda *args: other)
    with pytest.raises(AssertionError):
        generates_as_step_by_step(method)


def test_a_part_that_declares_nothing_is_not_exact():
    with pytest.raises(ValueError, match="nowhere: declares no exact_at"):
        exact_configuration(type("Nowhere", (), {"exact_at": None, "name": "nowhere"}))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_what_the_library_has_is_exact_somewhere(name):
    assert exact_configuration(REGISTRY[name]) != small_configuration(REGISTRY[name]) or not REGISTRY[name].exact_at


def test_an_estimator_that_learns_nothing_is_found(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Constant(SizedEstimator):
        name = "constant"

        def init(self, lead, width, start=None):
            return jnp.broadcast_to(jnp.eye(width)[:, : self.size], (*lead, width, self.size))

        def update(self, learned, x, weight=None):
            return learned

        def basis(self, learned, rank):
            return learned[..., :rank]

    monkeypatch.setitem(ESTIMATORS, "constant", Constant)
    with pytest.raises(AssertionError):
        check_estimator("constant")
