import os

# Most of the suite's time is compilation of programs that run for milliseconds: ask little of LLVM.
# (Level 0 is faster still, but sums in an order whose rounding real models can see.)
# XLA's own passes, and with them donation, fusion and memory plans, stay as they are.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1"

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def exact_matmuls():
    """float32 means float32: the TF32 or bf16 products that backends default to fail exactness tests."""
    with jax.default_matmul_precision("highest"):
        yield
