"""Perplexity and lm-eval scores of SmolLM2 through the full cache, against transformers and lm-eval's own `hf` model."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
from transformers import BatchEncoding

from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.perplexity.run import evaluate_perplexity, total_perplexity
from lowrank_kv_jax.models.load import load_model

pytestmark = [pytest.mark.xdist_group("smollm2"),
              pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]
GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "evals.json").read_text())
FULL = parse_methods(["full"])


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load_model("smollm2-135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))


class Golden:
    """Gives any text the golden tokens: transformers' own GGUF tokenizer cuts numerals unlike the model's."""

    def __call__(self, text, **kwargs):
        return BatchEncoding({"input_ids": GOLDEN["tokens"]})


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.slow) for mode in ("sliding", "stream")])
def test_perplexity_is_that_of_transformers(smollm2, mode):
    model = dataclasses.replace(smollm2, tokenizer=Golden())
    text = Corpus.of(["whatever"], "golden tokens")
    records = evaluate_perplexity(model, FULL, text, mode, 384, 128, 3, dtype="float32", rows=2)
    scored = sum(record["scored_tokens"] for record in records)
    assert total_perplexity(records, "full") == pytest.approx(math.exp(sum(GOLDEN[mode]) / scored), abs=1e-3)
    assert [record["nll"] for record in records] == pytest.approx(GOLDEN[mode], abs=0.01)


@pytest.mark.slow
def test_lm_eval_scores_are_those_of_its_hf_model(smollm2, tmp_path):
    pytest.importorskip("lm_eval")
    sys.path.insert(0, str(GOLDENS))
    from lm_documents import write_documents

    from lowrank_kv_jax.evals.lm_harness.run import TASKS, evaluate_lm_eval

    write_documents(tmp_path)
    records = evaluate_lm_eval(smollm2, FULL, TASKS, data=tmp_path, rows=8, dtype="float32")
    assert len(records) == 10
    for record in records:
        golden = GOLDEN["lm_eval"][record["task"]][record["index"]]
        assert record["logprobs"] == pytest.approx(golden["logprobs"], abs=2e-3)
        assert record["metrics"] == golden["metrics"]
