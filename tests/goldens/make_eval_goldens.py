"""Write evals.json: perplexities by transformers and log-likelihoods by lm-eval's own `hf` model (torch on the CPU).

Run in an environment with torch, transformers, accelerate, lm-eval and this package:

    python tests/goldens/make_eval_goldens.py [path of SmolLM2-135M-Instruct.Q4_1.gguf]
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from lm_documents import DOCUMENTS, write_documents
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from lowrank_kv_jax.evals.lm_harness.tasks import load_tasks

HERE = Path(__file__).parent
LICENSE = HERE.parents[1] / "LICENSE"
LENGTH, STEP, WINDOWS = 384, 128, 3


def strided_nll(model, tokens: list[int]) -> list[float]:
    """Of each window, as in transformers' documentation ("Perplexity of fixed-length models"), in sums."""
    sums, previous = [], 0
    for begin in range(0, len(tokens), STEP):
        end = min(begin + LENGTH, len(tokens))
        ids = torch.tensor([tokens[begin:end]])
        targets = ids.clone()
        targets[:, : -(end - previous)] = -100
        with torch.no_grad():
            mean = model(ids, labels=targets).loss.double()
        sums.append(float(mean * (targets[:, 1:] != -100).sum()))
        previous = end
        if len(sums) == WINDOWS:
            return sums
    raise ValueError("the text is too short")


def stream_nll(model, tokens: list[int]) -> list[float]:
    """Of what follows the first `STEP` tokens of each disjoint window."""
    sums = []
    for window in range(WINDOWS):
        ids = torch.tensor([tokens[window * LENGTH : (window + 1) * LENGTH]])
        targets = ids.clone()
        targets[:, :STEP] = -100
        with torch.no_grad():
            sums.append(float(model(ids, labels=targets).loss.double() * (LENGTH - STEP)))
    return sums


def main():
    path = Path(sys.argv[1]).resolve()
    lm = HFLM(pretrained=str(path.parent), gguf_file=path.name, device="cpu", dtype="float32", batch_size=4)
    tokens = lm.tokenizer(LICENSE.read_text()).input_ids
    found = {"sliding": strided_nll(lm.model, tokens), "stream": stream_nll(lm.model, tokens),
             "tokens": tokens[: LENGTH * WINDOWS], "lm_eval": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder))
        for name, task in load_tasks(list(DOCUMENTS), Path(folder), None, 1234).items():
            result = evaluate(lm, {"tasks": {name: task}, "groups": {}, "group_map": {}}, bootstrap_iters=0)
            found["lm_eval"][name] = [
                {"logprobs": [float(one[0]) for one in sample["filtered_resps"]],
                 "metrics": {metric: float(sample[metric]) for metric in sample["metrics"]}}
                for sample in sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
            ]
    (HERE / "evals.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
