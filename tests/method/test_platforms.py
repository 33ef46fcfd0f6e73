"""What an accelerator would run beside its kernels, run on a CPU: other factorisations, and all slots at once.

Of text that repeats itself, whose keys and values span next to nothing: products alone must not lose what they span.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, logits_through_a_cache, model, small_configuration
from jax.sharding import AbstractDevice, AbstractMesh

from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.backend import OVERRIDE, platform

GPU = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
FEW = "sinks=4,recent=8"
FITTED = (f"xkv:rank=0.9,{FEW}", f"ojakv:rank=0.9,{FEW}", f"ojakv:rank=0.9,normalize_dec=median,{FEW}")
"""Methods that fit bases to a prompt, or move them: these find what text spans, however they factorise."""
REPEATED = jnp.asarray(np.resize(np.random.default_rng(0).integers(0, PLAIN.vocab_size, 7), (2, 150)), jnp.int32)


@pytest.mark.parametrize("spec", [
    *(pytest.param(spec, marks=[] if spec == FITTED[1] else [pytest.mark.slow]) for spec in FITTED),
    *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(REGISTRY)),
])
def test_an_accelerators_branches_answer_as_a_cpus_do(spec, monkeypatch):
    monkeypatch.setenv(OVERRIDE, "xla")
    method = small_configuration(REGISTRY[spec]) if spec in REGISTRY else parse_method(spec)
    bases, tiny = bases_for(method, PLAIN), model(PLAIN)

    def logits():
        return logits_through_a_cache(method, tiny, REPEATED, bases, prompt=120, capacity=160)

    wanted = logits()
    with jax.sharding.use_abstract_mesh(GPU):
        assert platform() == "cuda"
        found = logits()
    assert not np.isnan(found).any()
    if spec in FITTED:
        np.testing.assert_allclose(found, wanted, atol=0.03 * np.abs(wanted).max())
