"""`python -m lowrank_kv_jax.cli`."""

import sys

from lowrank_kv_jax.cli import main

sys.exit(main())
