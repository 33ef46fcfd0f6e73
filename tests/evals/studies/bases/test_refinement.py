"""What refinement is worth, as `diagnose --tables refinement` measures it."""

import argparse
import functools

import helpers
import numpy as np
import pytest
from character_tokenizer import Characters

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.cli import diagnose
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.studies.bases.refinement import LEARNT, refinement_table
from lowrank_kv_jax.models.load import LoadedModel

ONE = "transform:bits=1,profiles=1,metric=attention,sampled=False"


@functools.cache
def tiny():
    return LoadedModel("tiny", helpers.PLAIN, helpers.model().params, Characters(), "a" * 64)


@pytest.mark.slow
def test_the_command_measures_what_each_part_is_worth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: tiny())
    own = tmp_path / "own.txt"
    own.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    parser = argparse.ArgumentParser()
    diagnose.add_parser(parser.add_subparsers())
    diagnose.run(parser.parse_args([
        "diagnose", "--tables", "refinement", "--methods", ONE, "--refine", "2", "--length", "48", "--calibrate", str(own),
        "--test", str(own), "--json", str(tmp_path / "rows.jsonl"),
    ]))
    rows = read_records(tmp_path / "rows.jsonl")
    assert [row["learnt"] for row in rows] == list(LEARNT) and {row["task"] for row in rows} == {"refinement"}
    assert all(row["output_error"] > 0 and row["divergence"] > 0 for row in rows)
    assert len({row["full_perplexity"] for row in rows}) == 1
    assert len({row["output_error"] for row in rows}) == len(LEARNT)  # each refined something else
    shown = capsys.readouterr().out
    assert "Refined on own.txt, measured on own.txt" in shown


def test_bases_that_cannot_be_refined_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="refine: method 'kivi' has no bases that can be refined"):
        refinement_table(None, Corpus.of(["text"], "text"), {"text": np.zeros((1, 8))}, ["kivi"], 1)
