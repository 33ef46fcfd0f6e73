"""What is known of one array of a model before it is loaded: shape, axes, and where a checkpoint keeps it."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One array of the parameter tree (a leaf: not itself a pytree).

    Attributes:
        shape: as the decoder uses it; matrices are `[in, out]`, the embedding `[vocab, embed]`.
        axes: logical axis of each dimension ("vocab", "embed", "q_heads", "kv_heads", "mlp", or `None`). The
            dimension named "q_heads" holds q_heads * head_dim channels, head by head, or a number for each; so
            "kv_heads".
        hf: tensor name in HF checkpoints.
        gguf: tensor name in GGUF files.
        transposed: checkpoints store it `[out, in]`.
        stacked: the leading dimension counts tensors that checkpoints keep apart (experts); their names hold
            the number in the place of `{}`.
        part: where checkpoints store it fused with others below each other: its first row, and the rows of all.
        turn: where they store it fused with others, their columns in turn: its first one, and how many take turns.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf: str
    gguf: str
    transposed: bool = False
    stacked: bool = False
    part: tuple[int, int] | None = None
    turn: tuple[int, int] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, of each tensor where several are stacked, and of its own part of a fused one."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a checkpoint that holds it."""
        shape = self.stored_shape if self.part is None else (self.part[1], *self.stored_shape[1:])
        return shape if self.turn is None else (*shape[:-1], shape[-1] * self.turn[1])

    @property
    def key(self) -> str:
        """A name that no other array of the model has."""
        key = self.hf if self.part is None else f"{self.hf}[{self.part[0]}]"
        return key if self.turn is None else f"{key}[{self.turn[0]}::{self.turn[1]}]"

    @property
    def pieces(self) -> tuple["ParamInfo", ...]:
        """What it is made of: itself (see `Beside`)."""
        return (self,)

    def views(self, host: np.ndarray) -> list[np.ndarray]:
        """Where its pieces lie in an array of its shape."""
        return [host]

    def joined(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """The array of its pieces."""
        return pieces[0]

    def names(self, naming: str) -> list[str]:
        """Of its tensors in a checkpoint; `naming` is "hf" or "gguf"."""
        name = getattr(self, naming)
        return [name.format(i) for i in range(self.shape[0])] if self.stacked else [name]


Size = tuple[int, str | None]
"""Of a dimension, with its axis."""


def linear(ins: Size, outs: Size, hf: str, gguf: str, bias: bool = False) -> dict[str, ParamInfo]:
    """The arrays of a linear map; names without ".weight"."""
    entry = {"kernel": ParamInfo((ins[0], outs[0]), (ins[1], outs[1]), f"{hf}.weight", f"{gguf}.weight", transposed=True)}
    if bias:
        entry["bias"] = ParamInfo((outs[0],), (outs[1],), f"{hf}.bias", f"{gguf}.bias")
    return entry


def fused(ins: Size, outs: Mapping[str, Size], hf: str, gguf: str) -> dict[str, dict[str, ParamInfo]]:
    """The arrays of linear maps by their names, which checkpoints store as one, below each other."""
    total, first, maps = sum(size for size, _ in outs.values()), 0, {}
    for name, size in outs.items():
        kernel = linear(ins, size, hf, gguf)["kernel"]
        maps[name] = {"kernel": dataclasses.replace(kernel, part=(first, total))}
        first += size[0]
    return maps


def norm(size: int, axis: str | None, hf: str, gguf: str) -> dict[str, ParamInfo]:
    """The array of a norm; names without ".weight"."""
    return {"scale": ParamInfo((size,), (axis,), f"{hf}.weight", f"{gguf}.weight")}
