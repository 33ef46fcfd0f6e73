import os

# Most of the suite's time is compilation of programs that run for milliseconds: leave LLVM's optimiser out.
# XLA's own passes, and with them donation, fusion and memory plans, stay as they are.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)


@pytest.fixture(scope="session", autouse=True)
def exact_matmuls():
    """float32 means float32: backends default to TF32 or bf16 products, which no exactness test would survive."""
    with jax.default_matmul_precision("highest"):
        yield
