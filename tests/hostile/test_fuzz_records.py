"""Mutants of records: lines that were not touched are read as they were, the others are records of JSON or left out."""

import json

from mutants import each, mutants, mutated_bytes, mutated_json, read_or_refused

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.results.resume import KEY, finished

SCORED = {
    "command": "eval ruler", "model": "m", "fingerprint": "f", "method": "full", "task": "niah_single_1", "length": 8, "index": 0,
    "seed": 0, "protocol": "query-agnostic", "score": 1.0, "cache_bytes": 8, "full_cache_bytes": 16, "shared_bytes": 1,
    "bytes_per_token": 2.0, "nominal_smaller": 2.0, "ttft_s": 0.1, "decode_tokens_per_s": 9.0, "rows": 2, "depth": 0.5,
    "prompt_sha256": "0", "versions": {"jax": "1"}, "device": "cpu", "style": "base", "bytes_by_kind": {"exact": 1},
}
NLL = {
    "command": "eval perplexity", "model": "m", "method": "full", "task": "perplexity-stream", "length": 8, "step": 4, "index": 0,
    "nll": 1.0, "scored_tokens": 4, "text": {"name": "x", "sha256": "0"}, "cache_bytes": 8, "full_cache_bytes": 16,
}
RECORDS = [base | {"method": method, "index": i, "length": 8 * (i + 1)}
           for base in (SCORED, NLL) for method in ("full", "kivi") for i in range(2)]
LINES = [json.dumps(record) for record in RECORDS]


def damaged(rng):
    """The bytes of a file, and the lines that stand there as they were written."""
    if rng.random() < 0.5:
        data = mutated_bytes("\n".join(LINES).encode() + b"\n", rng)
        return data, [line for line in LINES if line.encode() in data.split(b"\n")]
    number = rng.randrange(len(RECORDS))
    lines = [json.dumps(mutated_json(RECORDS[number], rng)) if i == number else line for i, line in enumerate(LINES)]
    return "\n".join(lines).encode() + b"\n", [line for i, line in enumerate(LINES) if i != number]


@mutants
def test_records(numbers, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    wanted = {tuple(record.get(field) for field in KEY): {"style": record.get("style")} for record in RECORDS}

    def check(rng):
        data, untouched = damaged(rng)
        path.write_bytes(data)
        with read_or_refused(path):
            found = read_records(path)
            assert all(isinstance(record, dict) for record in found)
            assert all(json.loads(line) in found for line in untouched)
        with read_or_refused(path):
            finished(path, wanted)
        code = main(["report", str(path)])
        told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("lowrank-kv: warning: ")]
        assert (code, len(told)) in ((0, 0), (2, 1)), told

    each(numbers, check)


@mutants
def test_figures(numbers, tmp_path, capsys):
    """Drawing takes a second: of every twentieth mutant."""
    path = tmp_path / "x.jsonl"

    def check(rng):
        path.write_bytes(damaged(rng)[0])
        assert main(["report", str(path), "--out", str(tmp_path / "out")]) in (0, 2), capsys.readouterr().err
        capsys.readouterr()

    each([number for number in numbers if number % 20 == 7], check)
