"""How weights lie on a mesh: heads, MLP channels and vocabulary over "model", replicated over the other axes."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameters import Leaf, param_table
from lowrank_kv_jax.storage.sharding import check_axes, propagated


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """The parameter tree with a `NamedSharding` in the place of each array.

    A dimension is cut over "model" where the axis divides it (heads are never cut), and replicated elsewhere.

    Raises:
        ValueError: the mesh has axes other than "data", "model" and "tokens", or "model" does not divide `kv_heads`.
    """
    check_axes(mesh)
    mesh, size = propagated(mesh), mesh.shape.get("model", 1)
    if config.kv_heads % size:
        raise ValueError(f"the mesh axis model={size} must divide kv_heads={config.kv_heads}")
    units = {
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "mlp": config.intermediate_size,
        "vocab": config.vocab_size,
    }

    def sharding(leaf: Leaf) -> NamedSharding:
        cut = [axis in units and units[axis] % size == 0 and size > 1 for axis in leaf.axes]
        return NamedSharding(mesh, PartitionSpec(*("model" if here else None for here in cut)))

    return jax.tree.map(sharding, param_table(config))
