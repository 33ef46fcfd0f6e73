"""Arrays as streams of like bytes: the same to the bit, fewer on disk, in blocks of their own."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lowrank_kv_jax.saving.checkpoint import load_arrays, load_metadata, save_arrays
from lowrank_kv_jax.saving.streams import BLOCK, from_streams, stream_sizes, to_streams
from lowrank_kv_jax.storage.state import states
from lowrank_kv_jax.storage.water_filled import empty_water_filled

RUNS = ((8, 3), (4, 5), (1, 9))  # 3 + 3 + 2 bytes
RNG = np.random.default_rng(0)


def noise(dtype, *shape):
    """Any bits, NaN among them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return RNG.integers(0, 2 if dtype is bool else 256, size, np.uint8).view(dtype).reshape(shape)


ARRAYS = {
    "groups.0.k": noise(ml_dtypes.bfloat16, 1, 2, 5, 4), "groups.1.k": noise(ml_dtypes.bfloat16, 1, 2, 5, 4),
    "groups.2.k": noise(np.float32, 3, 2), "groups.0.codes": noise(np.uint8, 1, 1, 6, 8), "length": noise(np.int32),
    "kept": noise(bool, 7), "none": noise(np.uint16, 2, 0), "groups.0.nothing": noise(np.uint8, 1, 1, 6, 0),
}
WIDTHS = {"groups.0.codes": ((8, 3), (4, 3), (1, 2)), "groups.0.nothing": ()}


def test_arrays_come_back_to_the_bit():
    streams = to_streams(ARRAYS, WIDTHS)
    assert {name: stream.size for name, stream in streams.items()} == stream_sizes(ARRAYS, WIDTHS) == {
        "groups.k.bfloat16.byte0": 80, "groups.k.bfloat16.byte1": 80, **{f"groups.k.float32.byte{i}": 6 for i in range(4)},
        "groups.codes.8bit": 18, "groups.codes.4bit": 18, "groups.codes.1bit": 12,
        **{f"length.int32.byte{i}": 1 for i in range(4)}, "kept.bool.byte0": 7,
    }
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in ARRAYS.items()}
    back = from_streams(streams, shapes, WIDTHS)
    assert {name: (x.shape, x.dtype, x.tobytes()) for name, x in back.items()} == {
        name: (x.shape, x.dtype, x.tobytes()) for name, x in ARRAYS.items()}


def test_like_bytes_lie_together():
    whole = to_streams(ARRAYS, WIDTHS)
    high = np.concatenate([ARRAYS[f"groups.{i}.k"].view(np.uint16).ravel() >> 8 for i in (0, 1)])
    np.testing.assert_array_equal(whole["groups.k.bfloat16.byte1"], high)
    np.testing.assert_array_equal(whole["groups.codes.4bit"], ARRAYS["groups.0.codes"][..., 3:6].ravel())


def test_packed_tokens_say_where_their_widths_lie():
    held = empty_water_filled(1, 1, 4, RUNS)
    (path, found), = states((held,))
    assert path == "0" and found is held and held.widths == {"codes": ((8, 3), (4, 3), (1, 2))}
    assert sum(size for _, size in held.widths["codes"]) == held.codes.shape[-1]


@pytest.mark.parametrize("numbers", [BLOCK // 2, BLOCK + 1])
def test_blocks_are_coded_by_themselves_and_in_fewer_bytes(numbers, tmp_path):
    x = {"groups.0.v": np.asarray(jnp.asarray(RNG.normal(size=numbers), jnp.bfloat16))}
    streams = to_streams(x, {})
    save_arrays(tmp_path / "streams", "cache", streams, {}, BLOCK)
    save_arrays(tmp_path / "plain", "cache", x, {})
    sizes = [sum(file.stat().st_size for file in (tmp_path / form).rglob("*") if file.is_file()) for form in ("streams", "plain")]
    assert sizes[0] < 0.95 * sizes[1]
    metadata = load_metadata(tmp_path / "streams", "cache")
    with ocp.StandardCheckpointer() as checkpointer:
        held = checkpointer.metadata(tmp_path / "streams" / metadata["arrays"]).item_metadata.tree
    assert {array.storage.chunk_shape for array in held.values()} == {(min(numbers, BLOCK),)}
    shapes = {name: np.broadcast_to(np.uint8(0), size) for name, size in stream_sizes(x, {}).items()}
    back = from_streams(load_arrays(tmp_path / "streams", metadata, shapes), x, {})
    assert all(isinstance(array, np.ndarray) for array in back.values())
    np.testing.assert_array_equal(back["groups.0.v"].view(np.uint16), x["groups.0.v"].view(np.uint16))
