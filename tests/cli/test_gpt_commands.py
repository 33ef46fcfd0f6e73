"""Commands on GPT-2 and Pythia as users have them: directories with weights, and heads that rotate in part or not at all."""

import pytest
from written_model import GPT2, PYTHIA, write_model

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records


@pytest.fixture(params=[GPT2, pytest.param(PYTHIA, marks=pytest.mark.slow)], ids=["gpt2", "pythia"])
def directory(request, tmp_path):
    write_model(tmp_path / "model", request.param)
    (tmp_path / "text.txt").write_text("some text that goes on and on, " * 60)
    return tmp_path


@pytest.mark.slow
def test_diagnose_and_generate_take_a_directory(directory, capsys):
    text, out = str(directory / "text.txt"), str(directory / "out.jsonl")
    common = ["--model", str(directory / "model"), "--dtype", "float32"]
    assert main(["diagnose", *common, "--calibrate", text, "--test", text, "--methods", "ojakv:rank=8,sinks=4,recent=8",
                 "--length", "96", "--windows", "1", "--layers", "2", "--refreshes", "0", "2", "--json", out]) == 0
    assert "Forgetting" in capsys.readouterr().out
    assert {record["task"] for record in read_records(out)} == {
        "adaptation", "rest", "forgetting", "compressibility", "spectra"}
    assert main(["diagnose", *common, "--tables", "forgetting", "--length", "96", "--refreshes", "999", "32"]) == 2
    assert "--refreshes 32: at least one must be at most 30, as many as fit" in capsys.readouterr().err
    bases = str(directory / "bases")
    assert main(["calibrate", *common, "--method", "ojakv:rank=8", "--corpus", text, "--length", "96", "--windows", "1",
                 "--out", bases]) == 0
    capsys.readouterr()
    assert main(["generate", *common, "--method", "ojakv:rank=8,sinks=4,recent=8", "--bases", bases,
                 "--prompt", "some text " * 9, "--max-new-tokens", "40"]) == 0
    assert capsys.readouterr().out
