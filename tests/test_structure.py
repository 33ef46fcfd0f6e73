"""What keeps a new method to one file, and the core light."""

import ast
import collections
import dataclasses
import graphlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowrank_kv_jax.method import KVMethod, Part
from lowrank_kv_jax.method.codec import Codec, TokenCodec
from lowrank_kv_jax.method.machine import Machine
from lowrank_kv_jax.method.reading import Reading
from lowrank_kv_jax.method.selection import Selection
from lowrank_kv_jax.methods import REGISTRY

ROOT = Path(__file__).parent.parent
FOLDERS = ("lowrank_kv_jax", "pallas_kernels", "models", "evals", "examples")
# A folder imports those before it, and itself.
ORDER = (
    "files", "checks", "progress", "attention", "storage", "pallas_kernels", "segments", "summaries", "models", "method",
    "estimators", "selections", "codecs", "methods", "generation", "serving", "calibration", "saving", "testing", "evals", "cli",
)
SOURCES = sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


def names_in_code(path):
    """Identifiers of a module; words of docstrings and comments do not count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]


def test_no_method_is_named_outside_of_its_own_file():
    own = {cls.__name__: Path(sys.modules[cls.__module__].__file__).resolve() for cls in REGISTRY.values()}
    listing = (ROOT / "lowrank_kv_jax" / "methods" / "__init__.py").resolve()
    examples = (ROOT / "examples").resolve()
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if path != listing and examples not in path.parents
        for name in sorted(set(names_in_code(path)) & set(own))
        if own[name] != path
    ]
    assert not found


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_method_says_what_it_is_and_takes_only_plain_fields(name):
    cls = REGISTRY[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(")  # not the dataclass signature
    for field in dataclasses.fields(cls):
        assert field.default is None or isinstance(field.default, bool | int | float | str), field.name


CONTRACTS = (Part, KVMethod, Codec, TokenCodec, Selection, Reading)


def functions(cls):
    """Names of the methods and properties that a class itself defines, dunder names apart, and whether they are abstract."""
    for name, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isfunction(function) and not (name.startswith("__") and name.endswith("__")):
            yield name, getattr(function, "__isabstractmethod__", False)


@pytest.mark.parametrize("cls", [*REGISTRY.values(), Machine], ids=lambda cls: cls.__name__)
def test_no_concrete_method_is_overridden(cls):
    """Abstract or final; what a contract gives by default may be said otherwise, by one class."""
    found = collections.defaultdict(list)
    for base in cls.__mro__:
        if base.__module__.startswith("lowrank_kv_jax") and base not in CONTRACTS:
            for name, abstract in functions(base):
                if not abstract:
                    found[name].append(base.__name__)
    assert not {name: classes for name, classes in found.items() if len(classes) > 1}


def test_the_contracts_ask_little():
    hooks = [(cls.__name__, name) for cls in CONTRACTS for name, _ in functions(cls)
             if not name.startswith("_") and not any(name in vars(base) for base in cls.__mro__[1:])]
    assert len(hooks) <= 37, hooks


def test_nothing_is_left_to_do():
    word = "TO" + "DO"
    assert not [path.name for path in SOURCES if re.search(rf"\b({word}|FIXME|XXX)\b", path.read_text())]


def test_import_names_follow_the_folders():
    for folder in ("models", "evals", "pallas_kernels"):
        link = ROOT / "lowrank_kv_jax" / folder
        assert link.is_symlink() and link.readlink() == Path("..") / folder


def modules():
    """Modules of the package by their path."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "examples":
            parts = parts if parts[0] == "lowrank_kv_jax" else ("lowrank_kv_jax", *parts)
            found[path] = ".".join(parts).removesuffix(".__init__")
    return found


def imports(path, names):
    """Modules of the package that a file imports anywhere, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowrank_kv_jax"):
            assert not node.level
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in names else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def test_folders_import_in_one_order_and_nothing_imports_in_a_circle():
    names, graph, upward = modules(), {}, []
    for path, name in names.items():
        found = set(imports(path, set(names.values()))) - {name, "lowrank_kv_jax"}
        graph[name] = {other for other in found if not name.startswith(f"{other}.")}  # a package comes before its modules
        if name != "lowrank_kv_jax":
            place = ORDER.index(name.split(".")[1])
            upward += [f"{name} -> {other}" for other in found if ORDER.index(other.split(".")[1]) > place]
    assert not upward
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_few_files_are_loose():
    assert len(list((ROOT / "lowrank_kv_jax").glob("*.py"))) <= 3
    assert [path.name for path in (ROOT / "evals").glob("*.py")] == ["__init__.py"]


def test_the_core_never_imports_torch():
    heavy = "torch", "transformers", "datasets", "matplotlib", "lm_eval"
    core = "lowrank_kv_jax.generation.forward, lowrank_kv_jax.generation.generate, lowrank_kv_jax.methods"
    code = f"import sys, {core}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
