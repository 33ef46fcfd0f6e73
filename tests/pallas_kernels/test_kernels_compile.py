"""The kernels compile for hardware that is not there; in a process of their own, where the compilers can be had.

`LOWRANK_KV_COMPILER_PYTHON` names an interpreter whose environment has the extra `kernel-compilers`.
"""

import dataclasses
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from documented import OF_SPECS, specs_of

from lowrank_kv_jax.methods import REGISTRY

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
from lowrank_kv_jax.pallas_kernels.compile_grid import compile_all
results, missing = compile_all(sys.argv[1:])
rows = [{"name": r.name, "failure": r.failure, **r.facts} for r in results]
json.dump({"results": rows, "missing": missing}, sys.stdout)
"""


AHEAD = 32 * 1024  # bytes under way while a program waits for its next tile
OF_A_WARP = 4 * 1024  # the same of programs of one warp, of which eight share a core
# rows of 90 bytes (and 364 spilled by jax 0.11.2); pages of the host, one by one; 512 and 608 components in 8 bits, 12 bytes
# spilled
MISSED = {"ojakv:rank=45", "shadowkv:values=host", "ojakv:rank=0.25,bits=8", "xkv:group=5,rank=0.1,bits=8,basis_dtype=int8"}
SERIAL = ("syevd", "geqrf", "orgqr")  # of cuSOLVER: one matrix of a batch after the other
COMPILERS = {"sm_90": "jax-cuda13-plugin", "v5e": "libtpu", "v6e": "libtpu"}


WHOLE = """
import json, sys
from lowrank_kv_jax.evals.speed.compile_whole import compile_whole
results, missing = compile_whole(sys.argv[1:])
json.dump({"results": [{"failure": r.failure, **r.facts} for r in results], "missing": missing}, sys.stdout)
"""

STEPS = """
import json, sys
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.speed.compile_whole import compile_steps
results, missing = compile_steps(sys.argv[1:], parse_methods(["full", "single-svd:rank=0.5", "ojakv:rank=0.5"]))
json.dump({"results": [{"failure": r.failure, "name": r.name, **r.facts} for r in results], "missing": missing}, sys.stdout)
"""

DEPTHS = """
import json, sys
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.speed.compile_model import compile_models
results, missing = compile_models(sys.argv[1:], parse_methods(["full", "palu:rank=0.5", "transform:bits=2", "h2o"]), (2, 3))
json.dump({"results": [{"failure": r.failure, "name": r.name, **r.facts} for r in results], "missing": missing}, sys.stdout)
"""

EVERY_DEPTH = """
import functools, json, sys
from lowrank_kv_jax.evals.speed.compile_model import CACHE, model_program
from lowrank_kv_jax.evals.speed.compile_step import program_facts
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler
missing, results = {}, []
try:
    for name, cls in sorted(REGISTRY.items()):
        eight, twelve = (
            program_facts(name, sys.argv[1], functools.partial(model_program, cls(), sys.argv[1], layers, 8192), CACHE)
            for layers in (8, 12))
        results.append({"method": name, "programs": (twelve.facts["kernels"] - eight.facts["kernels"]) / 4})
except NoCompiler as reason:
    missing = {sys.argv[1]: str(reason)}
json.dump({"results": results, "missing": missing}, sys.stdout)
"""

REFRESHES = """
import json, sys
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.speed.compile_step import compile_refresh
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler
missing, results = {}, []
try:
    results = [compile_refresh(method, sys.argv[1], 4096)
               for method in parse_methods(sys.argv[2:]).values()]
except NoCompiler as reason:
    missing = {sys.argv[1]: str(reason)}
json.dump({"results": [{"failure": r.failure, **r.facts} for r in results], "missing": missing}, sys.stdout)
"""

DEFAULTS = """
import json, sys
from lowrank_kv_jax.evals.speed.compile_step import compile_step
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler
missing, results = {}, []
try:
    results = [(name, compile_step(cls(), sys.argv[1], 8192)) for name, cls in sorted(REGISTRY.items())]
except NoCompiler as reason:
    missing = {sys.argv[1]: str(reason)}
json.dump({"results": [{"method": name, "failure": r.failure, **r.facts} for name, r in results], "missing": missing}, sys.stdout)
"""

DOCUMENTED = """
import json, sys
from lowrank_kv_jax.evals.speed.compile_step import compile_step
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels.compile_only import NoCompiler
target, *specs = sys.argv[1:]
missing, results, known = {}, [], set()
try:
    for spec in specs:
        r = compile_step(parse_method(spec), target, 8192, known=known)
        results.append({"spec": spec, "failure": r.failure, **r.facts})
except NoCompiler as reason:
    missing = {target: str(reason)}
json.dump({"results": results, "missing": missing}, sys.stdout)
"""

EDGES = """
import json, sys
from lowrank_kv_jax.pallas_kernels import gpu_shared_memory
from lowrank_kv_jax.pallas_kernels.compile_grid import PLAIN, ROTARY, Program, compile_all
cases = (ROTARY, 16, False), (ROTARY, 16, True), (PLAIN, 1, False), (PLAIN, 2, False)
def at(*ranks):
    return [Program(op, 256 if op == ROTARY else rank, rank, batch=1, joint=True, queries=queries, chosen=chosen)
            for rank, (op, queries, chosen) in zip(ranks, cases)]
largest, beyond = at(1088, 960, 1152, 576), at(1152, 1024, 1216, 608)
results, missing = compile_all(sys.argv[1:], (*largest, *beyond))
gpu_shared_memory._check = lambda *_: None
results += compile_all(sys.argv[1:], beyond)[0]
json.dump({"results": [r.failure for r in results], "missing": missing}, sys.stdout)
"""


def compiled(program, target, *arguments):
    """What a process with the compilers says of a target; skips where there is none."""
    python = os.environ.get("LOWRANK_KV_COMPILER_PYTHON", sys.executable)
    if python == sys.executable:  # the answer without starting a process for it
        try:
            version(COMPILERS[target])
        except PackageNotFoundError:
            pytest.skip(f"no compiler for {target}: {COMPILERS[target]} is not installed, see the extra kernel-compilers")
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # of a CPU: libtpu refuses them
    environment = {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program, target, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout[done.stdout.index('{"results"') :])
    if said["missing"]:
        pytest.skip(said["missing"][target])
    assert said["results"]
    return said["results"]


@pytest.mark.parametrize("target", COMPILERS)
def test_every_program_compiles(target):
    results = compiled(PROGRAM, target)
    assert not [(r["name"], r["failure"]) for r in results if r["failure"]]
    if target == "sm_90":
        assert not [r["name"] for r in results if r["spilled"]]
        assert not [r["name"] for r in results if r["shared"] > 227 * 1024]
        tensor_cores = [{"mma", "wgmma"} & set(r["instructions"]) for r in results if "float32" not in r["name"]]
        assert all(tensor_cores)
    else:  # no buffer of tokens is copied into another layout; queries of each tile are folded for all heads at once
        most = {r["name"]: 1 << 28 if "joint, turned" in r["name"] else 1 << 20 for r in results}
        assert not [r["name"] for r in results if r["temporaries"] > most[r["name"]]]


@pytest.mark.parametrize("target", ["sm_90", "v5e"])
def test_a_long_prompt_is_read_within_three_gigabytes(target):
    """Logits of every pair of 32K tokens would take 137 GB. Most of what is left is the MLP's. On four devices with heads
    cut they exchange activations, and a TPU's attention is the kernel there, too."""
    result, cut, *chunks = compiled(WHOLE, target)
    assert result["failure"] is None and result["temporaries"] <= 3e9
    assert cut["failure"] is None and cut["temporaries"] <= 1e9 and cut["collective"] <= 32768 * 4096
    assert target == "sm_90" or not result["loops"] + cut["loops"]
    assert len(chunks) == 2 and not [r for r in chunks if r["failure"] or r["temporaries"] > 4e8]


@pytest.mark.parametrize("target", ["sm_90", "v5e"])
def test_a_step_over_four_devices_exchanges_no_tokens(target):
    """Be it heads that they share, or slots. Nor does it copy them. What a TPU copies are bases of a row that were fitted to its prompt."""
    results = compiled(STEPS, target)
    assert len(results) == 12 and not [r for r in results if r["failure"] or r["collective"] > 1 << 17]
    steps = [r for r in results if r["name"].startswith("step")]
    assert not [r for r in steps if r["moved"] > (0 if target == "sm_90" else 1 << 19) or r["loops"] or r["said"]]
    assert not [r for r in steps if r["padded"] > 1 << 20]  # weights of slots may be, values not
    assert not [name for r in results for name in r["libraries"] if any(x in name for x in SERIAL)]
    if target == "sm_90":  # 13 of the layer, one that repeats its row, one that takes it out again
        assert steps[0]["kernels"] <= 15 and steps[0]["temporaries"] < 1 << 22


@pytest.mark.slow
def test_one_layer_more_is_few_programs_more():
    """And no bytes: what is widened or rebuilt of tokens is that of one layer at a time. Over several devices no weight is
    gathered, be it the table of the embedding for one token."""
    found = compiled(DEPTHS, "sm_90")
    cut = [r for r in found if r["name"].endswith("=4")]
    assert len(cut) == 7 and not [r for r in cut if r["failure"] or r["collective"] > 1 << 15]
    full, more, palu, palu_more, *others = (r for r in found if r not in cut)
    assert more["kernels"] - full["kernels"] <= 13 and palu_more["kernels"] - palu["kernels"] <= 14
    assert more["kernels"] <= 3 * 13 + 8  # eight of the embedding and the logits
    assert max(full["temporaries"], palu_more["temporaries"]) < 1 << 21
    assert all(abs(two["temporaries"] - three["temporaries"]) < 1 << 20 for two, three in zip(others[::2], others[1::2], strict=True))


MOST_PROGRAMS = 16


@pytest.mark.slow
def test_a_layer_more_is_at_most_sixteen_programs():
    """Of every method at its default, on average over four layers behind eight: groups of layers repeat."""
    found = {r["method"]: r["programs"] for r in compiled(EVERY_DEPTH, "sm_90")}
    assert found.keys() == {*REGISTRY}
    assert not {name: count for name, count in found.items() if count > MOST_PROGRAMS}


@pytest.mark.slow
def test_no_refresh_decomposes():
    """Of those with chunks that open and merge, by every estimator, and that compress anew what has gathered."""
    specs = ["osp", "osp:paper", *(f"osp:estimator={name}" for name in ("svd", "oja", "gha")),
             "ojakv:normalize_dec=median", "xkv:recompress=64,rank=0.25"]
    results = compiled(REFRESHES, "sm_90", *specs)
    assert len(results) == len(specs) and not [r for r in results if r["failure"]]
    assert all("cusolver_potrf_ffi" in r["libraries"] for r in results)
    assert not [name for r in results for name in r["libraries"] if any(x in name for x in SERIAL)]


def test_what_shared_memory_cannot_hold_is_refused_before_the_compiler_refuses_it():
    """For each kernel: the largest rank that is admitted (of values, before RoPE; they go by 32, or 64 beyond 512), the next."""
    answers = compiled(EDGES, "sm_90")
    largest, foretold, tried = answers[:4], answers[4:8], answers[8:]
    assert largest == [None] * 4
    assert all("bytes of shared memory, the GPU has 232448" in x for x in foretold)
    assert len(tried) == 4 and all("Shared memory size limit exceeded" in x for x in tried)


@pytest.mark.slow
def test_every_method_decodes_on_sm_90_by_default():
    """At the shape of Llama 3.1 8B."""
    results = compiled(DEFAULTS, "sm_90")
    assert not [(r["method"], r["failure"]) for r in results if r["failure"]]
    passes_the_gate(results, "method")
    assert not [r["method"] for r in results if r["said"] or r["temporaries"] > 1 << 26]


@pytest.mark.slow
def test_no_step_loops_or_copies_a_cache_on_v5e():
    """At the shape of Llama 3.1 8B, 8.4 million numbers a side; what is copied are a row's own bases, of `xkv`."""
    results = compiled(DEFAULTS, "v5e")
    assert not [(r["method"], r["failure"]) for r in results if r["failure"]]
    assert not [r["method"] for r in results if r["loops"]]
    assert not [(r["method"], r["moved"]) for r in results if r["moved"] > (1 << 20 if r["method"] == "xkv" else 1 << 18)]
    assert {r["method"] for r in results if r["said"]} == {"shadowkv"}
    assert not [(r["method"], r["temporaries"]) for r in results if r["temporaries"] > 1 << 21]


@pytest.mark.slow
@pytest.mark.parametrize("target, specs", [
    ("sm_90", ("ojakv:rank=0.5,rope=pre+kvzip:keep=0.5", "shadowkv")),
    ("v5e", ("ojakv:rank=0.5,rope=pre+kvzip:keep=0.5", "transform:bits=3+kvzip:keep=0.5")),
])
def test_tokens_that_were_selected_before_rope_are_read_by_kernels(target, specs):
    results = compiled(DOCUMENTED, target, *specs)
    assert len(results) == len(specs) and not [r for r in results if r["failure"] or r["said"] or r["loops"]]
    assert not [(r["spec"], r["moved"]) for r in results if r["moved"] > 1 << 17]


@pytest.mark.slow
def test_tokens_in_tiles_are_read_by_kernels_on_v5e():
    specs = ["kivi:bits=4", "kivi:int8", "kivi+kvzip", "ojakv:bits=4", "ojakv:rope=post,bits=4", "ojakv:bits=8"]
    results = compiled(DOCUMENTED, "v5e", *specs)
    assert len(results) == len(specs) and not [r for r in results if r["failure"] or r["said"] or r["loops"]]
    assert not [(r["spec"], r["temporaries"], r["moved"]) for r in results if r["temporaries"] > 5 << 18 or r["moved"] > 1 << 19]


@pytest.mark.slow
def test_wide_codes_in_8_bits_have_the_memory_that_they_need_on_v5e():
    """2,048 tokens of them are more than the 16 MiB that a kernel has by default."""
    (result,) = compiled(DOCUMENTED, "v5e", "xkv:rank=0.5,bits=8")
    assert not result["failure"] and not result["said"] and result["temporaries"] < 5 << 18


@pytest.mark.slow
def test_every_rank_of_the_docs_decodes_on_sm_90():
    """Every spec of a low-rank method in the README and the docs, at the same shape; equal programs once."""
    found = {spec for page in OF_SPECS for spec in specs_of(page)}
    ranked = {name for name, cls in REGISTRY.items() if any(field.name == "rank" for field in dataclasses.fields(cls))}
    specs = sorted(spec for spec in found if spec.split(":")[0] in ranked)
    assert len(specs) > 100
    results = [r for r in compiled(DOCUMENTED, "sm_90", *specs) if "known" not in r]
    failed = {r["spec"]: r["failure"] for r in results if r["failure"]}
    assert all("must divide the model's 8 kv heads" in reason for reason in failed.values()), failed  # of another model
    passes_the_gate([r for r in results if not r["failure"] and r["spec"] not in MISSED], "spec")


def passes_the_gate(results, name):
    """No loop, and kernels that read ahead and spill nothing, or are refused before."""
    assert not [r[name] for r in results if r["loops"] or r["spilled"] or r["shared"] > 227 * 1024]
    assert not [r[name] for r in results if r["read_ahead"] and r["waits"] < 2]
    assert not [r[name] for r in results if r["read_ahead"] and r["in_flight"] < (OF_A_WARP if r["threads"] == 32 else AHEAD)]
