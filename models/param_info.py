"""What is known of one array of a model before it is loaded: shape, axes, and where a checkpoint keeps it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """One array of the parameter tree (a leaf: not itself a pytree).

    Attributes:
        shape: as the decoder uses it; matrices are `[in, out]`, the embedding `[vocab, embed]`.
        axes: logical axis of each dimension ("vocab", "embed", "q_heads", "kv_heads", "mlp", or `None`). The
            dimension named "q_heads" holds q_heads * head_dim channels, head by head; so "kv_heads".
        hf: tensor name in HF checkpoints.
        gguf: tensor name in GGUF files.
        transposed: checkpoints store it `[out, in]`.
        stacked: the leading dimension counts tensors that checkpoints keep apart (experts); their names hold
            the number in the place of `{}`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf: str
    gguf: str
    transposed: bool = False
    stacked: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, of each tensor where several are stacked."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    def names(self, naming: str) -> list[str]:
        """Of its tensors in a checkpoint; `naming` is "hf" or "gguf"."""
        name = getattr(self, naming)
        return [name.format(i) for i in range(self.shape[0])] if self.stacked else [name]


def linear(
    ins: tuple[int, str | None], outs: tuple[int, str | None], hf: str, gguf: str, bias: bool = False
) -> dict[str, ParamInfo]:
    """The arrays of a linear map, sizes with their axes; names without ".weight"."""
    entry = {"kernel": ParamInfo((ins[0], outs[0]), (ins[1], outs[1]), f"{hf}.weight", f"{gguf}.weight", transposed=True)}
    if bias:
        entry["bias"] = ParamInfo((outs[0],), (outs[1],), f"{hf}.bias", f"{gguf}.bias")
    return entry


def norm(size: int, axis: str | None, hf: str, gguf: str) -> dict[str, ParamInfo]:
    """The array of a norm; names without ".weight"."""
    return {"scale": ParamInfo((size,), (axis,), f"{hf}.weight", f"{gguf}.weight")}
