"""How weights lie on a "data" x "model" mesh: heads, MLP channels and vocabulary over "model"."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameters import ParamInfo, param_table


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """The parameter tree with a `NamedSharding` in the place of each array.

    A dimension is cut over "model" where the axis divides it (heads are never cut), and replicated elsewhere.

    Raises:
        ValueError: the mesh has axes other than "data" and "model", or "model" does not divide `kv_heads`.
    """
    if unknown := sorted(set(mesh.axis_names) - {"data", "model"}):
        raise ValueError(f"mesh axes {unknown} are not known; they must be 'data' and 'model'")
    size = mesh.shape.get("model", 1)
    if config.kv_heads % size:
        raise ValueError(f"the mesh axis model={size} must divide kv_heads={config.kv_heads}")
    units = {
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "mlp": config.intermediate_size,
        "vocab": config.vocab_size,
    }

    def sharding(info: ParamInfo) -> NamedSharding:
        cut = [axis in units and units[axis] % size == 0 and size > 1 for axis in info.axes]
        return NamedSharding(mesh, PartitionSpec(*("model" if here else None for here in cut)))

    return jax.tree.map(sharding, param_table(config))
