import functools
import gc
import os
import threading
from importlib.metadata import version
from pathlib import Path

# Most of the suite's time is compilation of programs that run for milliseconds: ask little of LLVM, in one piece.
# XLA's own passes, and with them donation, fusion and memory plans, stay as they are.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if version("jaxlib").startswith("0.10."):
    QUICK["xla_cpu_use_fusion_emitters"] = "false"  # the older emitters compile faster; from 0.11 on they crash
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    flags = [f"--{name}={value}" for name, value in QUICK.items()]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

# As many workers as cores: each keeps to one, and XLA takes no more threads than that, which would wait for each other.
_worker, _workers = (os.environ.get(f"PYTEST_XDIST_WORKER{more}", "") for more in ("", "_COUNT"))
if _worker.startswith("gw") and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    if len(_cores) == int(_workers):
        os.sched_setaffinity(0, {_cores[int(_worker[2:])]})

# Operations that remember the lines of all their callers, not only their own, make the suite 3% longer.
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")

# Beside XLA's threads those of NumPy's BLAS wait in loops that take the time of the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A program that another process compiled can crash this one when it is read back.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

# JAX lowers each program in an MLIR context of its own. To make one is a quarter of what a small program takes, and the
# more there were, the longer each takes: one for each thread does, which keeps what it has seen until programs go.
_new_context = mlir.make_ir_context
context_of = functools.cache(lambda thread: _new_context())
mlir.make_ir_context = lambda: context_of(threading.get_ident())

# Traced programs are many objects in cycles: look for garbage less often, and not among what was imported.
gc.set_threshold(20_000, 20, 20)

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def exact_matmuls():
    """float32 means float32: the TF32 or bf16 products that backends default to fail exactness tests."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_kept():
    """Tiny models share a fingerprint, and the user's cache directory is not for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowrank_kv_jax.saving.kept_bases.user_cache_directory", lambda: Path(os.devnull))
        yield


def pytest_configure(config):
    """xdist would begin with what has the most tests and end with the one that takes longest, beside an idle worker."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A file runs in one worker, with the programs and fixtures that its tests share, where no mark says otherwise.

    Whole programs come first: were they last, one worker would wait a minute for the other.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    gc.freeze()


def memory_bytes() -> int:
    """Of the machine, or 0 where the system does not say."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def resident_bytes() -> int:
    """Of this process, or 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


_last = None
_limit = max(2e9, memory_bytes() / 4)


@pytest.fixture(autouse=True)
def few_compiled_programs(request):
    """Programs are dropped between files, methods or codecs once they fill a quarter of the memory, and another gigabyte.

    That takes seconds, and those that are used again are compiled again.
    """
    global _last, _limit
    callspec = getattr(request.node, "callspec", None)
    about = callspec.params if callspec else {}
    now = request.node.path, about.get("name") or about.get("codec")
    if _last not in (None, now) and resident_bytes() > _limit:
        jax.clear_caches()
        context_of.cache_clear()
        _limit = max(_limit, resident_bytes() + 1e9)  # what was freed is used again before the process grows
    _last = now
