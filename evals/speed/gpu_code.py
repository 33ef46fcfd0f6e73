"""What the code of a GPU's attention kernels does, read from the PTX that a compiler left behind."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowrank_kv_jax.pallas_kernels.compile_only import spills

OF_OURS = re.compile(r"\.entry (\w*attention\w*)\(")
"""Entries that are kernels of this package; XLA's own are not looked at."""
_ASYNC = re.compile(r"cp\.async\.c[ag]\S* [^;]*?\], (0x[0-9a-f]+|\d+)")
_EVENT = re.compile(r"(cp\.async\.c[ag]\S* [^;]*|cp\.async\.commit_group|cp\.async\.wait_group\s+\d+)")


def code_facts(folder: Path) -> dict[str, Any]:
    """Of the attention kernels among the `.ptx` files of a folder.

    Returns:
        `cp_async`: bytes of the narrowest asynchronous copy; `in_flight`: of the tiles that a program has asked for while
        it computes, the fewest of all kernels; `spilled`: of registers, of all. None where there is no kernel, or no
        asynchronous copy.
    """
    codes = {path: path.read_text() for path in sorted(folder.glob("*.ptx"))}
    ours = {path: code for path, code in codes.items() if OF_OURS.search(code)}
    copies = [code for code in ours.values() if _ASYNC.search(code)]
    return {
        "cp_async": min((width for code in copies for width in _widths(code)), default=None),
        "in_flight": min((in_flight(code) for code in copies), default=None),
        "spilled": sum(map(spills, ours)) if ours else None,
    }


def in_flight(code: str) -> int:
    """Bytes that the threads of a program have asked for and not waited for, where the loop waits the least.

    A loop asks for one group of copies a turn and waits until so many groups are left; the waits for all are behind it.
    """
    groups, open_group, left = [], 0, 0
    for event in _EVENT.findall(code):
        if event.startswith("cp.async.wait_group"):
            left = max(left, int(event.split()[-1]))
        elif event.startswith("cp.async.commit_group"):
            groups.append(open_group)
            open_group = 0
        else:
            open_group += sum(_widths(event))
    threads = re.search(r"\.(?:req|max)ntid (\d+)", code)
    assert threads is not None
    return left * _middle([size for size in groups if size]) * int(threads[1])


def _widths(code: str) -> list[int]:
    return [int(width, 0) for width in _ASYNC.findall(code)]


def _middle(sizes: Sequence[int]) -> int:
    return sorted(sizes)[len(sizes) // 2] if sizes else 0
