"""Every function whose signature says shapes, called under a type checker: a program, run by `test_annotations.py`.

Users do not pay for these checks. Here functions are replaced by checked ones before anything calls them, methods of
classes too: what overrides one is held to the shapes that its contract says. Most programs are traced, not compiled.
Prints what is wrong and what was never called.
"""

import functools
import gc
import importlib
import inspect
import pkgutil
import sys
import typing

from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

FOLDERS = ("storage", "pallas_kernels", "method", "estimators", "selections", "codecs", "generation", "serving", "calibration")
annotated, called, wrong = set(), set(), {}


def says_shapes(annotation) -> bool:
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return hasattr(annotation, "dim_str") or any(map(says_shapes, parts))


def shapes_of(function) -> dict:
    found = getattr(function, "__annotations__", {})
    return {name: annotation for name, annotation in found.items() if says_shapes(annotation)}


def checked(function, shapes, name):
    """The function, held to these annotations alone."""
    annotated.add(name)

    @functools.wraps(function)
    def call(*args, **kwargs):
        called.add(name)
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    parameters = [p.replace(annotation=shapes.get(p.name, typing.Any)) for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=shapes.get("return", typing.Any))
    strict = jaxtyped(call, typechecker=beartype)

    @functools.wraps(function)
    def told(*args, **kwargs):
        try:
            return strict(*args, **kwargs)
        except TypeCheckError as error:  # all of them are told, not the first
            wrong.setdefault(name, error)
            return function(*args, **kwargs)

    return told


def check_class(cls):
    for name, function in list(vars(cls).items()):
        owner = next((base for base in cls.__mro__ if shapes_of(vars(base).get(name))), None)
        if inspect.isfunction(function) and owner is not None and name == function.__name__:  # an alias is no other
            setattr(cls, name, checked(function, shapes_of(vars(owner)[name]), f"{owner.__name__}.{name}"))


def check_everything():
    for folder in FOLDERS:
        package = importlib.import_module(f"lowrank_kv_jax.{folder}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.rpartition(".")[2].startswith(("gpu_", "tpu")):
                importlib.import_module(found.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("lowrank_kv_jax.")]
    values = {id(value): value for module in modules for value in vars(module).values()}
    ours = {key: value for key, value in values.items()
            if str(getattr(value, "__module__", "")).startswith(tuple(f"lowrank_kv_jax.{folder}" for folder in FOLDERS))}
    new = {}
    for key, value in ours.items():
        if inspect.isclass(value):
            check_class(value)
        elif hasattr(value, "__name__") and (shapes := shapes_of(getattr(value, "__wrapped__", value))):  # compiled ones, too
            new[key] = checked(value, shapes, f"{value.__module__.removeprefix('lowrank_kv_jax.')}.{value.__name__}")
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])


gc.disable()  # traced programs are many objects in cycles, which a short program may keep
check_everything()

from annotated_calls import call_everything  # noqa: E402

call_everything()
for name, error in wrong.items():
    print(f"{name}: {error}\n")
print(f"{len(annotated)} checked, {len(wrong)} wrong; never called:", *sorted(annotated - called))
sys.exit(len(annotated) < 90 or bool(wrong) or annotated != called)
