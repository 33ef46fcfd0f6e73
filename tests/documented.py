"""What the README and the docs write as code, and the specs among it."""

import re
from pathlib import Path

from lowrank_kv_jax.methods import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
OF_SPECS = [page for page in PAGES if page not in ("CHANGELOG.md", "docs/extending.md")]
"""Pages whose specs are of today's methods."""
SPEC = re.compile(r"(?<![\w/:+.-])([a-z0-9-]+:[\w=.,-]+(?:\+[a-z0-9-]+(?::[\w=.,-]+)?)*)(?![\w;.,=])")


def code_of(text: str) -> list[str]:
    """What stands in blocks and between backticks."""
    fence = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return fence.findall(text) + re.findall(r"`([^`]+)`", fence.sub("", text))


def specs_of(page: str) -> list[str]:
    """Specs with fields, but for those with a placeholder: N, ENDS, `...`."""
    code = code_of((ROOT / page).read_text(encoding="utf-8"))
    found = [spec for piece in code for spec in SPEC.findall(piece) if spec.split(":")[0] in REGISTRY]
    return [spec.rstrip(".,") for spec in found if not re.search(r"[A-Z]|\.\.\.", spec)]
