"""What is read from the PTX of a GPU's kernels."""

import pytest

from lowrank_kv_jax.evals.speed import gpu_code

HEAD = """.visible .entry {name}(
	.param .u64 .ptr .global {name}_param_0
)
.reqntid 128, 1, 1
{{
"""
COPY = "	@%p1 cp.async.cg.shared.global [ %r57 + 0 ], [ %rd138 + 0 ], 0x10, %r300;\n"
NARROW = "	cp.async.ca.shared.global [ %r5 + 0 ], [ %rd1 + 0 ], 0x4, %r30;\n"


def kernel(name, copy, left):
    """Two groups of three copies before the loop, one in it, `left` groups outstanding, and the wait for all behind it."""
    group = 3 * copy + "	cp.async.commit_group;\n"
    return HEAD.format(name=name) + 2 * group + f"$L:\n	cp.async.wait_group 	{left};\n{group}	bra $L;\n	cp.async.wait_group 	0;\n}}\n"


@pytest.mark.parametrize("left, wanted", [(0, 0), (1, 3 * 16 * 128), (2, 2 * 3 * 16 * 128)])
def test_what_is_in_flight_is_what_the_loop_leaves_outstanding(left, wanted):
    assert gpu_code.in_flight(kernel("coefficient_attention", COPY, left)) == wanted


def test_the_worst_of_our_kernels_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_code, "spills", lambda path: 84 if "1" in path.name else 0)
    assert gpu_code.code_facts(tmp_path) == {"cp_async": None, "in_flight": None, "spilled": None}
    (tmp_path / "0.ptx").write_text(kernel("coefficient_attention", COPY, 2))
    (tmp_path / "1.ptx").write_text(kernel("rotary_coefficient_attention", NARROW, 1))
    (tmp_path / "2.ptx").write_text(kernel("gemm_fusion_dot", NARROW, 0))
    assert gpu_code.code_facts(tmp_path) == {"cp_async": 4, "in_flight": 3 * 4 * 128, "spilled": 84}
