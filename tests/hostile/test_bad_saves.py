"""Fields and files of saves by the table: where, what stands there (`...` for nothing), and words of the refusal."""

import shutil

import helpers
import jax
import jax.numpy as jnp
import pytest
from refusing import refused
from saves import KINDS, MODEL, OJA, changed

from lowrank_kv_jax.saving.checkpoint import METADATA
from lowrank_kv_jax.saving.saved_bases import save_bases

HELD = "groups.0.ends.0.k"
LAYOUT = "layout"
COMMON = (
    (("format",), 99, "format=99: this version reads format"), (("format",), ..., "format=None: this version reads format"),
    (("format",), 3.0, "format=3.0: must be an integer"), (("format",), [2], "format=[2]: this version reads"),
    (("arrays",), "../elsewhere", "arrays='../elsewhere': must be arrays-, then 16 hexadecimal digits"),
    (("arrays",), 5, "arrays=5: must be a string"), (("arrays",), "x" * 9999, "must be arrays-, then 16"),
    (("arrays",), "arrays-" + 16 * "0", "the directory with the arrays is missing"),
    (("arrays",), ..., "the field 'arrays' is missing"), (("files",), [], "files=[]: must be an object"),
    (("files",), {"../x": "0"}, "../x: is missing"), (("files",), {"/etc/passwd": "0"}, "/etc/passwd: is missing"),
    (("files",), ..., "the field 'files' is missing"), (("sha256",), "0", "is damaged (its sha256 is not that of its fields)"),
    (("sha256",), ..., "the field 'sha256' is missing"), (("sha256",), 5, "sha256=5: must be a string"),
    (("model",), ..., "the field 'model' is missing"), (("model",), ["x"] * 9999, "must be a string"),
    (("fingerprint",), 5, "fingerprint=5: must be a string"), (("fingerprint",), ..., "the field 'fingerprint' is missing"),
    (("fingerprint",), "0" * 64, "'tiny'"), (("method",), None, "method=None: must be a string"),
)
TABLES = {
    "bases": (
        (("kind",), "cache", "kind='cache': must be 'bases'"), (("kind",), ..., "kind=None: must be 'bases'"),
        (("kind",), ["bases"], "kind=['bases']: must be 'bases'"), (("fit",), None, "fit=None: must be an object"),
        (("fit", "method"), "palu", "they have method='palu', this method asks for"),
        (("fit", "rank_k"), 10**30, "rank_k=1000000000000000000000000000000, this method asks for 4"),
        (("groups",), ..., "the field 'groups' is missing"), (("groups",), {}, "groups={}: must be a list"),
        (("groups",), [], "groups has 0 entries: must be 3"), (("groups", 0), 5, "groups[0]=5: must be an object or null"),
        (("groups", 0), None, "does not fit: 0.k"), (("groups", 0, "k"), 5, "groups[0].k=5: must be an object with shape"),
        (("groups", 0, "k"), ..., "does not fit: 0.k"), (("groups", 0, "z"), {}, "groups[0].z: the bases of this method have no such"),
        (("groups", 0, "k", "dtype"), "int32", "groups[0].k.dtype='int32': must be one of float16"),
        (("groups", 0, "k", "dtype"), "float16", "does not fit: 0.k"),
        (("groups", 0, "k", "dtype"), ["x"], "dtype=['x']: must be a string"),
        (("groups", 0, "k", "dtype"), ..., "the field 'dtype' is missing"),
        (("groups", 0, "k", "shape"), "x", "shape='x': must be a list"), (("groups", 0, "k", "shape"), [-1], "shape=[-1]: must be"),
        (("groups", 0, "k", "shape"), [10**30], "must be a list of sizes from 0 to 2**31 - 1"),
        (("groups", 0, "k", "shape"), [1.0], "shape=[1.0]: must be a list of sizes"),
        (("groups", 0, "k", "shape"), [True], "shape=[True]: must be a list of sizes"),
        (("groups", 0, "k", "shape"), [2**30, 2**30], "does not fit: 0.k"), (("groups", 0, "k", "shape"), [1, 2], "0.k: (1, 32, 4)"),
    ),
    "cache": (
        (("kind",), "bases", "kind='bases': must be 'cache'"), ((LAYOUT,), [], "layout=[]: must be an object"),
        ((LAYOUT, "batch"), 0, "layout: batch=0: must lie in 1.."), ((LAYOUT, "batch"), 10**30, "must lie in 1..268435456"),
        ((LAYOUT, "batch"), 2, "does not fit"), ((LAYOUT, "capacity"), "x", "layout: capacity='x': must be an integer"),
        ((LAYOUT, "capacity"), 10**4000, "must lie in 1..268435456"),
        ((LAYOUT, "capacity"), ..., "the field 'capacity' is missing"), ((LAYOUT, "capacity"), 17, "does not fit"),
        ((LAYOUT, "capacity"), 7, "layout: capacity=7: the prompt has 8 tokens"), ((LAYOUT, "prompt"), -1, "prompt=-1: must lie in 0.."),
        ((LAYOUT, "capacity"), 2**28, "does not fit"), ((LAYOUT, "capacity"), 2**28 + 1, "must lie in 1..268435456"),
        ((LAYOUT, "block"), True, "layout: block=True: must be an integer"), ((LAYOUT, "block"), 1.5, "block=1.5: must be an integer"),
        ((LAYOUT, "dtype"), "int32", "layout: dtype='int32': must be one of float16"), ((LAYOUT, "dtype"), 5, "dtype=5: must be a string"),
        ((LAYOUT, "tokens"), "piles", "layout: tokens='piles': must be 'rows' or 'lanes'"), (("bases",), 5, "bases=5: must be a string or null"),
        (("bases",), "0", "made with other calibrated bases"), (("method",), "KIVI()", "was made by KIVI(), not by Full()"),
    ),
    "compressed": (
        (("coded",), [], "coded=[]: must be an object"), (("coded",), {}, f"{HELD}: None, expected 'bfloat16[1, 4, 16, 8]'"),
        (("coded",), ..., f"what was saved does not fit: {HELD}"), (("coded", HELD), 5, f"{HELD}: 5, expected 'bfloat16[1, 4, 16, 8]'"),
        (("coded", "z"), "int32[1]", "z: 'int32[1]', expected None"), ((LAYOUT, "capacity"), 17, HELD),
        (("coded", HELD), "bfloat16[1, 4, 8, 16]", f"{HELD}: 'bfloat16[1, 4, 8, 16]', expected"), ((LAYOUT, "dtype"), "float32", HELD),
        ((LAYOUT, "capacity"), 2**28, HELD),
    ),
    "layers": (
        (("kind",), "cache", "kind='cache': must be 'layers'"), ((LAYOUT,), [], "layout=[]: must be an object"),
        ((LAYOUT, "batch"), 2, "does not fit"), ((LAYOUT, "capacity"), 7, "layout: capacity=7: the prompt has 8 tokens"),
        (("attention",), 5, "attention=5: must be a string"), (("attention",), ..., "the field 'attention' is missing"),
        (("attention",), "0", "made for another AttentionSpec"), (("bases",), "0", "made with other calibrated bases"),
        (("method",), "KIVI()", "were made by KIVI(), not by Full()"),
    ),
}
ROWS = [(kind, *row) for kind, table in TABLES.items() for row in (*COMMON, *table)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return {kind: make(tmp_path_factory.mktemp(kind) / "own") for kind, (make, _) in KINDS.items()}


@pytest.mark.parametrize("kind, place, value, words", ROWS, ids=[f"{kind}: {words:.60}" for kind, _, _, words in ROWS])
def test_fields_of_a_description(kind, place, value, words, saved, tmp_path):
    path = changed(saved[kind], tmp_path, place, value)
    refused(lambda: KINDS[kind][1](path), str(path), words)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", ("", "[]", "{}", "5", "[" * 100_000, "\0" * 100, "\ud800"), ids=lambda text: repr(text[:4]))
def test_descriptions_that_are_none(kind, content, saved, tmp_path):
    path = shutil.copytree(saved[kind], tmp_path / "own")
    (path / METADATA).write_text(content, errors="surrogatepass")
    refused(lambda: KINDS[kind][1](path), str(path / METADATA))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_are_missing_or_links(kind, saved, tmp_path):
    path, load = shutil.copytree(saved[kind], tmp_path / "own"), KINDS[kind][1]
    arrays = next(path.glob("arrays-*"))
    data = next(file for file in arrays.rglob("*") if file.is_file())
    data.unlink()
    refused(lambda: load(path), f"{data.name}: is missing")
    data.symlink_to("/dev/zero")  # never read
    refused(lambda: load(path), f"{data.name}: is missing")
    arrays.rename(tmp_path / "arrays")
    refused(lambda: load(path), "the directory with the arrays is missing")
    arrays.symlink_to(tmp_path / "arrays")
    refused(lambda: load(path), "the directory with the arrays is missing")


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_bit_of_any_file_is_named(kind, saved, tmp_path):
    for file in sorted(file.relative_to(saved[kind]) for file in saved[kind].glob("arrays-*/**/*") if file.is_file()):
        path = shutil.copytree(saved[kind], tmp_path / "own", dirs_exist_ok=True)
        data = bytearray((path / file).read_bytes())
        data[len(data) // 2] ^= 1
        (path / file).write_bytes(data)
        assert refused(lambda: KINDS[kind][1](path)).startswith(f"{path / file}: is damaged")  # noqa: B023


def test_bases_of_integers_are_not_saved(tmp_path):
    whole = jax.tree.map(lambda u: u.astype(jnp.int32), helpers.bases_for(OJA))
    refused(lambda: save_bases(tmp_path / "own", whole, MODEL, OJA), "bases: 0.k is int32: must be one of float16, bfloat16")
    assert not list(tmp_path.iterdir())
