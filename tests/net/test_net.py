"""Every method gives what it gave when the net was recorded: `record.py` says how, and prints tables of differences."""

import fnmatch

import numpy as np
import pytest
from cases import DEFAULTS, cases
from record import (
    NAMED_CHANGES,
    REFUSED_NOW,
    STEADY,
    TOLERANCE,
    Outcome,
    compare,
    entry_of,
    few,
    judge,
    load,
    matches,
    tolerance,
)

from lowrank_kv_jax.methods import REGISTRY

RECORDED = load()
QUICK = ("kv8 static-pca-h:rank=4,sinks=4,recent=8+snapkv:budget=24,sinks=4,recent=8+moments",)  # each part that there is


@pytest.mark.parametrize(
    "name", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in RECORDED]
)
def test_a_case_is_as_recorded(name):
    verdict = judge(name, RECORDED[name])
    assert verdict.stands, f"{verdict.word}: {verdict.detail}"
    if verdict.word in ("works now", "refused otherwise", "broken otherwise", "named change"):
        pytest.skip(f"{verdict.word}: {verdict.detail}")  # no failure, but to be read


NEWER = {"eigenattention": {"code"}, "ojakv": {"follow"}, "osp": {"follow", "joint", "paper", "streaming"}, "xkv": {"paper"}}
"""Presets that came after the record."""


def test_every_case_is_recorded_and_every_method_is_among_them():
    assert list(RECORDED) == cases()
    assert set(QUICK) <= set(RECORDED) and not any("error" in RECORDED[case] for case in QUICK)
    specs = [case.split(" ", 1)[1] for case in RECORDED]
    for name, spec in DEFAULTS.items():  # what came after the record is not in it
        assert f"kv3 {spec}" in RECORDED and f"kv8 {spec}" in RECORDED
        for preset in set(REGISTRY[name].presets) - NEWER.get(name, set()):
            assert fnmatch.filter(specs, f"{name}:{preset}*"), f"{name}:{preset}"


def test_named_changes_name_cases():
    for pattern, why in (NAMED_CHANGES | REFUSED_NOW).items():
        assert why and any(matches(case, pattern) for case in RECORDED), pattern


def outcome_of(logits, own=80, **by_kind):
    return Outcome(logits, by_kind or {"exact": 60, "bases": 40}, own)


def recorded(monkeypatch, outcome):
    """The entry of a case with that outcome."""
    monkeypatch.setattr("record.run_case", lambda case, seed, nudge=0: outcome)
    return entry_of("kv3 full")


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(43, 2, 64)).astype(np.float32)


def test_what_differs_is_seen(monkeypatch, logits):
    entry = recorded(monkeypatch, outcome_of(logits))
    assert compare(entry, outcome_of(logits)).word == "equal"
    assert compare(entry, outcome_of(logits + 1e-6)).word == "equal"
    for step in (0, 7, 42):  # those that are not kept, in their digest
        moved = logits.copy()
        moved[step, 1] += 2 * TOLERANCE
        assert compare(entry, outcome_of(moved)).word == "differs"
    swapped = logits.copy()  # neither kept nor in the digest
    best, other = (int(i) for i in logits[9, 0].argsort()[[-1, 2]])
    swapped[9, 0, [best, other]] = logits[9, 0, [other, best]]
    verdict = compare(entry, outcome_of(swapped))
    assert not verdict.stands and "other tokens from step 9 on" in verdict.detail
    tied = logits.copy()
    tied[9, 0, other] = logits[9, 0, best] + 1e-6
    again = recorded(monkeypatch, outcome_of(tied))
    tied[9, 0, other] -= 2e-6
    assert compare(again, outcome_of(tied)).stands  # either of two that are alike


def test_bytes_may_shrink_and_not_grow(monkeypatch, logits):
    entry = recorded(monkeypatch, outcome_of(logits))
    less = compare(entry, outcome_of(logits, exact=50, bases=40))
    assert less.stands and less.word == "fewer bytes" and "exact 60 -> 50" in less.detail
    assert compare(entry, outcome_of(logits, exact=40, coefficients=20, bases=40)).stands  # spent on something else
    more = compare(entry, outcome_of(logits, exact=61, bases=40))
    assert not more.stands and more.word == "more bytes"
    assert not compare(entry, outcome_of(logits, own=81)).stands  # hidden behind bases that became smaller


def test_what_was_refused_may_work_and_must_not_break(monkeypatch, logits):
    refused, broken = {"error": "ValueError: no"}, {"error": "TypeError: oh"}
    for entry in (refused, broken):
        assert compare(entry, outcome_of(logits)) == (True, "works now", f"was {entry['error']}")
        assert compare(entry, ValueError("since")).stands
    assert compare(refused, ValueError("no\nand more")).word == "as refused"
    assert not compare(refused, TypeError("oh")).stands
    assert compare(broken, AttributeError("oh")).stands
    assert not compare(recorded(monkeypatch, outcome_of(logits)), ValueError("no")).stands


def test_a_change_stands_under_its_name_and_a_crash_does_not(monkeypatch, logits):
    entry = recorded(monkeypatch, outcome_of(logits + 1))
    monkeypatch.setattr("record.run_case", lambda case, seed, nudge=0: outcome_of(logits))
    assert judge("kv3 full", entry).word == "differs"
    monkeypatch.setitem(NAMED_CHANGES, "kv3 f*", "mended")
    assert judge("kv3 full", entry).word == "named change" and judge("kv8 full", entry).word == "differs"
    monkeypatch.setattr("record.run_case", lambda case, seed, nudge=0: 1 / 0)
    assert not judge("kv3 full", entry).stands


def test_texts_that_jump_are_passed_over(monkeypatch, logits):
    def run_case(case, seed, nudge=0):
        return outcome_of(logits + (seed < 2) * nudge * 1e-3)

    monkeypatch.setattr("record.run_case", run_case)
    entry = entry_of("kv3 full")
    assert entry["seed"] == 2 and entry["moved"] <= STEADY and tolerance(entry) == TOLERANCE
    monkeypatch.setattr("record.run_case", lambda case, seed, nudge=0: outcome_of(logits + (4 - seed) * nudge * 1e-3))
    entry = entry_of("kv3 full")
    assert entry["seed"] == 3 and tolerance(entry) > 2e-3
    assert np.shape(entry["logits"]) == (few(logits).size,)
