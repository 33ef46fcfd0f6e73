"""Methods of other packages: installed beside this one, they are known by name like its own.

    [project.entry-points."lowrank_kv_jax.methods"]
    long-keys = "my_package.long_keys"        # a module; importing it registers its parts
"""

import warnings
from importlib.metadata import entry_points

GROUP = "lowrank_kv_jax.methods"


def load_plugins() -> None:
    """Import what installed packages declare; one that cannot be imported is a warning, and the others are there."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # another package's, of any kind
            warnings.warn(f"{GROUP}: {entry.name} = {entry.value} cannot be imported ({type(error).__name__}: {error}); "
                          "its methods are missing", stacklevel=2)
