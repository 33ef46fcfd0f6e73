"""Makes `lm_eval --model lowrank-kv` work: lm-eval knows only its own models and has no entry points for others.

Installed beside a .pth file that imports this module when Python starts, as setuptools and coverage do. It adds one
line to lm-eval's table of models when that table is imported, and imports nothing else before.
"""

import sys

MODELS = "lm_eval.models"
NAME, TARGET = "lowrank-kv", "lowrank_kv_jax.evals.lm_harness.model:LowRankKV"


class _AddOurs:
    """A finder that steps in for `lm_eval.models` alone, and lets the usual finders load it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODELS:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from lm_eval.api.registry import model_registry

            if NAME not in model_registry:
                model_registry.register(NAME, target=TARGET)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AddOurs())
