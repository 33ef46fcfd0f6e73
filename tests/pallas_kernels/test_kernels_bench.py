"""`lowrank-kv bench kernels` measures what it says and refuses to time a wrong result."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.speed import kernels, steps, sweep
from lowrank_kv_jax.evals.speed.llama_8b import LLAMA_8B
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels.gpu_grid import Tuning, decode_grid, tuned

SMALL = ["--lengths", "40", "--batch", "2", "--ranks", "8", "--q-heads", "2", "--kv-heads", "1", "--head-dim", "32",
         "--dtype", "float32", "--ragged", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setitem(kernels.LAST_LEVEL_CACHE, "cpu", 1)


@pytest.mark.slow
def test_every_contender_is_checked_timed_and_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 1e9)
    log, figure = tmp_path / "kernels.jsonl", tmp_path / "kernels.png"
    asked = ["--ops", "coefficients", "int8", "rotary", "--json", str(log), "--plot", str(figure)]
    assert main(["bench", "kernels", *SMALL, *asked]) == 0
    names = ["full rank, xla", "full rank, dot_product", "rank 8, xla", "rank 8, dot_product", "rank 8 int8, xla",
             "rank 8 pre-RoPE, xla"]
    records = read_records(log)
    assert [r["method"] for r in records] == names and figure.stat().st_size > 1000
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    full = min(r["seconds"] for r in records[:2])
    for record in records:
        assert record["error"] < 1e-4 and record["seconds"] > 0
        assert record["speedup"] == pytest.approx(full / record["seconds"])
    tokens = 20 + 40  # ragged: half of the length, and all of it
    assert [r["read_bytes"] for r in records[1:6]] == [tokens * 2 * n for n in (128, 32, 32, 8, 32)]


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = kernels._attend

    def wrong(shape, contender, *args):
        out, lse = right(shape, contender, *args)
        return out * 1.01, lse

    monkeypatch.setattr(kernels, "_attend", wrong)
    with pytest.raises(ValueError, match="full rank, xla.*errs by"):
        kernels.bench(kernels.Shape(1, 40, 2, 1, 32, "float32"), [8], repeats=1)


@pytest.mark.parametrize("wrong, said", [(["--q-heads", "3", "--kv-heads", "2"], "--q-heads 3"), (["--ranks", "0"], "--ranks")])
def test_sizes_are_checked(capsys, wrong, said):
    assert main(["bench", "kernels", *wrong]) == 2
    assert said in capsys.readouterr().err


def test_launches_have_what_they_are_asked_to_have():
    own = decode_grid(4, 64, 32768, 256)
    with tuned(Tuning(tile=64, warps=2)):
        other = decode_grid(4, 64, 32768, 256)
    with tuned(Tuning(waves=4, stages=3)):
        more = decode_grid(4, 64, 32768, 256)
    assert other == dataclasses.replace(own, tile=64, warps=2)
    assert more == dataclasses.replace(own, splits=2 * own.splits, stages=3)
    assert decode_grid(4, 64, 32768, 256) == own


def test_a_sweep_takes_a_gpu(capsys, tmp_path):
    assert main(["bench", "kernels", "--sweep", "--results", str(tmp_path / "new")]) == 2
    assert "--sweep: needs a GPU, JAX runs on cpu" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_launch_is_checked_before_it_is_timed(monkeypatch):
    """Interpreted here; the second tuning's results are spoiled."""
    right = sweep._attend

    def spoiled(program, way, *args):
        return right(program, way, *args) * (1.5 if way == Tuning(tile=32) else 1)

    monkeypatch.setattr(sweep, "_attend", spoiled)
    program = dataclasses.replace(sweep.KERNELS[2], size=128)
    xla, own, other = sweep.sweep([program], {1: (Tuning(), Tuning(tile=32))}, workers=1)
    assert xla.way() == "xla" and own.way() == "as it is" and own.seconds > 0 and own.error < 1e-2
    assert other.seconds is None and "errs by 0.5" in other.failure


@pytest.mark.slow
def test_nothing_compiles_while_steps_are_timed(caplog):
    spec = "kivi:bits=4"
    width = dict(vocab_size=64, hidden_size=32, intermediate_size=64, q_heads=2, kv_heads=1, head_dim=16)
    config = dataclasses.replace(LLAMA_8B, num_layers=2, windows=(None,) * 2, rope=RopeSpec(10000.0, 16), **width)
    params, prompt = steps.random_weights(config, jax.random.key(0)), jnp.ones((1, 40), jnp.int32)

    def tried(blocks):
        return steps._tried(config, params, prompt, 2, blocks, spec, parse_method(spec), (None,))

    assert tried(1).failure is None
    with jax.log_compiles():
        found = tried(steps.BLOCKS)
    assert found.failure is None and min(found.prefill_s, found.step_s, found.refresh_s, found.bytes) > 0
    assert not [record.message for record in caplog.records if "ompil" in record.message]
