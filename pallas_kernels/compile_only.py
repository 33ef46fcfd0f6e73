"""Compiling for accelerators that are not there: what the compiler of sm_90, TPU v5e or v6e says of a program.

Needs the optional extra `kernel-compilers`, and a process of its own: libtpu and the CUDA plugin are loaded whole. It
catches shapes that do not lower, memory that does not fit and spilled registers. It shows neither speed nor races.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

TARGETS = ("sm_90", "v5e", "v6e")
EXTRA = "pip install 'lowrank-kv-jax[kernel-compilers]'"

OURS = ("attention", "append_token", "expanded_values", "merge_splits", "page_choice", "page_logits", "ranges_of_heads",
        "turned_back", "votes")
"""What names of kernels have in them."""

# what libtpu would ask a metadata server for
_NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
# LLVM would name the functions of stack traces that nobody reads, for half a minute a kernel
_NO_TRACES = {"LLVM_DISABLE_SYMBOLIZATION": "1"}


class NoCompiler(Exception):
    """A target's compiler is not installed or does not start; the message says why."""


class KernelFacts(NamedTuple):
    """What ptxas, XLA and Mosaic GPU say of one GPU kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of registers spilled to memory, stores and loads.
        shared: bytes of shared memory of a program.
        grid, threads: of the launch.
        instructions: kinds of PTX instructions that matter, and how often they stand in the code.
        copies: asynchronous copies into shared memory by their bytes, and how often they stand in the code.
        waits: groups of copies that are still under way when a program waits for its next tile.
        in_flight: bytes of these.
    """

    registers: int
    spilled: int
    shared: int
    grid: str
    threads: int
    instructions: dict[str, int]
    copies: dict[int, int] = {}
    waits: int = 0
    in_flight: int = 0


def device(target: str) -> Any:
    """A device that one can compile for and nothing else.

    Raises:
        ValueError: not one of `TARGETS`.
        NoCompiler: the compiler cannot be had.
    """
    return devices(target)[0]


@functools.cache
def devices(target: str, count: int = 1) -> tuple[Any, ...]:
    """So many of them side by side; a host of TPUs has four.

    Raises:
        ValueError, NoCompiler: as `device`.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r}: allowed are {', '.join(TARGETS)}")
    for name, value in (_NO_TRACES if target == "sm_90" else _NO_TPU).items():
        os.environ.setdefault(name, value)
    try:
        if target == "sm_90":
            config = (Path(__file__).parent / "targets" / "h200.txtpb").read_text()
            topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=config)
        else:
            topology = topologies.get_topology_desc(f"{target}:2x2", platform="tpu")
    except Exception as error:  # plugins raise what they like
        raise NoCompiler(f"no compiler for {target}: {_first_line(error)}. {EXTRA}") from error
    return tuple(topology.devices[:count])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def compile_for(
    target: str, f: Callable[..., Any], *args: Any, dump: str | None = None, donate: int | tuple[int, ...] = ()
) -> Any:
    """`lowered_for`, compiled; may not be run. `dump` as in `compile_lowered`.

    Raises:
        NoCompiler: as `device`.
    """
    return compile_lowered(lowered_for(target, f, *args, donate=donate), dump)


def compile_lowered(lowered: Any, dump: str | None = None) -> Any:
    """What `lowered_for` gave, compiled.

    Args:
        dump: a folder for what the compiler has to say.
    """
    options = {"xla_dump_to": dump} if dump else {}
    if dump and jax.version.__version_info__ >= (0, 11):
        options["xla_dump_emitter_re"] = ".*"  # else there is no PTX among the files
    return lowered.compile(compiler_options=options or None)


def lowered_for(target: str, f: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = ()) -> Any:
    """`f` lowered for arguments of the shapes of `args` (arrays or ShapeDtypeStructs).

    Args:
        args: those with a sharding keep it.
        donate: numbers of arguments that the results may overwrite.

    Raises:
        NoCompiler: as `device`.
    """
    where = NamedSharding(Mesh(np.array([device(target)]), ("x",)), PartitionSpec())
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or where), args)
    there = device(target)
    platform = "cuda" if target == "sm_90" else "tpu"
    cores = getattr(there, "core_count", None) or getattr(there, "num_cores", 1)
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(there.device_kind, cores, platform))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f, donate_argnums=donate).trace(*args).lower(lowering_platforms=(platform,))


def gpu_facts(kernel: str, f: Callable[..., Any], *args: Any) -> KernelFacts:
    """Facts about the kernel of that name in `f` compiled for sm_90.

    Raises:
        NoCompiler: as `device`, or ptxas is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_for("sm_90", f, *args, dump=folder)
        (found,) = (facts for name, facts in kernels_in(folder) if name == kernel)
        return found


def kernels_in(folder: str) -> Iterator[tuple[str, KernelFacts]]:
    """Name and facts of every kernel of ours in what a compiler of sm_90 left in a folder.

    Raises:
        NoCompiler: ptxas is not installed.
    """
    files = [Path(folder) / name for name in sorted(os.listdir(folder))]
    thunks = "".join(x.read_text() for x in files if x.name.endswith("thunk_sequence.txt"))
    for file in (x for x in files if x.suffix == ".ptx"):
        head, *entries = re.split(r"(?=^\.(?:visible )?\.?entry )", file.read_text(), flags=re.MULTILINE)
        for entry in entries:
            name = re.search(r"entry (\w+)\(", entry)
            if name is None or not any(own in name[1] for own in OURS):
                continue
            launch = re.search(rf"\b{name[1]} grid: (\[.*?\]) threads: \[(\d+), .*?shared_memory: (\d+) bytes", thunks)
            assert launch is not None
            threads, copies, (waits, under_way) = int(launch[2]), _copies(entry), _waits(entry)
            yield name[1], KernelFacts(*_registers(_assemble(head + entry)), int(launch[3]), launch[1], threads,
                                       _instructions(entry), copies, waits, threads * under_way)


def _copies(ptx: str) -> dict[int, int]:
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x[0-9a-f]+|\d+)", ptx)
    return dict(Counter(int(width, 0) for width in found))


def _waits(ptx: str) -> tuple[int, int]:
    """Groups under way in the loop, and bytes of theirs of a thread: they are as large as the last ones before it."""
    waits = [(int(found[1], 0), found.start()) for found in re.finditer(r"cp\.async\.wait_group\s+(\w+)", ptx)]
    deepest, at = max(waits, default=(0, 0))
    *groups, _ = ptx[:at].split("cp.async.commit_group")
    last = groups[len(groups) - deepest :]
    return deepest, sum(width * count for group in last for width, count in _copies(group).items())


def mosaic_facts(kernel: str, f: Callable[..., Any], *args: Any) -> KernelFacts:
    """The same of a Mosaic GPU kernel, which XLA does not compile but has compiled, with dumps of their own.

    Raises:
        NoCompiler: as `device`.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _mosaic_dumps(folder):
            compile_for("sm_90", f, *args)
        (stem,) = (path.with_suffix("") for path in Path(folder).glob(f"{kernel}_*.ptx"))
        ptx, said, module = (stem.with_suffix(x).read_text() for x in (".ptx", ".ptxas", ".before_layout_inference.txt"))
    sizes = r"\S+ = %c(\d+)\w*, \S+ = %c(\d+)\w*, \S+ = %c(\d+)\w*"
    launch = re.search(
        rf"gpu.launch .* in \({sizes}\) threads.* in \({sizes}\) dynamic_shared_memory_size %c(\d+)", module
    )
    assert launch is not None
    *grid, x, y, z, shared = (int(n) for n in launch.groups())
    return KernelFacts(*_registers(said), shared, str(grid), x * y * z, _instructions(ptx))


@contextlib.contextmanager
def _mosaic_dumps(folder: str) -> Iterator[None]:
    """Have Mosaic GPU write what it makes into a folder, without its complaint that there is no disassembler."""
    said = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_CUDA_ROOT": str(Path(_ptxas()).parent.parent)}
    before, stderr = {name: os.environ.get(name) for name in said}, os.dup(2)
    os.environ.update(said)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _registers(said: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that ptxas spilled."""
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))


def _assemble(ptx: str) -> str:
    try:
        done = subprocess.run(
            [_ptxas(), "-v", "-arch=sm_90a", "-", "-o", os.devnull], input=ptx, capture_output=True, text=True, check=True
        )
    except subprocess.CalledProcessError as error:
        raise NoCompiler(f"ptxas failed: {error.stderr.strip()}") from error
    return done.stderr + done.stdout


def _ptxas() -> str:
    for folder in (*sys.path, *os.environ.get("PATH", "").split(os.pathsep)):
        for found in (Path(folder) / "nvidia" / "cu13" / "bin" / "ptxas", Path(folder) / "ptxas"):
            if found.is_file():
                return str(found)
    raise NoCompiler(f"ptxas is not installed. {EXTRA}")


_KINDS = {
    "wgmma": r"\bwgmma\.mma_async", "mma": r"\bmma\.sync", "cp.async": r"\bcp\.async\.c[ag]",
    "tma": r"\bcp\.async\.bulk\.tensor", "ldmatrix": r"\bldmatrix",
    "ex2": r"\bex2\.", "bar": r"\bbar\.sync", "ld.local": r"\bld\.local",
}


def _instructions(ptx: str) -> dict[str, int]:
    found = Counter({kind: len(re.findall(pattern, ptx)) for kind, pattern in _KINDS.items()})
    return {kind: n for kind, n in found.items() if n}
