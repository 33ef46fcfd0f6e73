"""The README's Python runs as it stands, from top to bottom, on the real model."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
FEWER_WINDOWS = """
import functools, lowrank_kv_jax as lkv
lkv.calibrate = functools.partial(lkv.calibrate, length=512, windows=1)  # the blocks leave both at their defaults
"""
OUTCOME = """
assert out.tokens[0] and more.tokens[0] and used.total > 0
assert int(more.cache.length[0]) > int(out.cache.length[0])
assert lkv.load_cache("talk", method, model, bases=bases).length == out.cache.length
assert cache.length == tokens.shape[1] + 1 and logits.shape == (1, model.config.vocab_size)
assert lkv.methods.REGISTRY["long-keys"] is LongKeys
print(out.texts[0] + more.texts[0])
"""


def test_every_block_of_python_runs(tmp_path):
    """In one process of their own, which shares names from block to block; one of them registers a method."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    code = "\n".join([FEWER_WINDOWS, *blocks, OUTCOME])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
