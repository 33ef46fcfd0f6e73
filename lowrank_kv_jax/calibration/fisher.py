"""Fisher information of the key and value projections over a corpus, by `jax.grad` (Palu; StreamingKV, 3.1 and 4.1)."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.calibration.backward import attend_exactly, layer_output, loss_gradient, residual_streams
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.estimators.moments import Fisher
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.progress import ProgressBar
from lowrank_kv_jax.storage import precise
from lowrank_kv_jax.storage.sharding import to_host

PROJECTIONS = {"k": "k_proj", "v": "v_proj"}


class FisherSample(NamedTuple):
    """Of how many sequences the gradients are taken.

    Attributes:
        length: tokens of a sequence, at most a window's.
        sequences: how many, spread evenly over the windows; None: as many as there are.
    """

    length: int = 512
    sequences: int | None = None

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """The sequences `[m, length]` of windows `[n, S]`.

        Raises:
            ValueError: more sequences than there are.
        """
        length = min(self.length, tokens.shape[1])
        rows = tokens[:, : tokens.shape[1] // length * length].reshape(-1, length)
        if self.sequences is None:
            return rows
        if self.sequences > len(rows):
            raise ValueError(f"fisher_sequences={self.sequences}: {tokens.shape[0]} windows of {tokens.shape[1]} hold "
                             f"{len(rows)} of {length} tokens; give more windows, or shorter sequences")
        return rows[np.arange(self.sequences) * len(rows) // self.sequences]


def check_projections(params: Any, reader: str = "rank_by='fisher'", instead: str = "; use rank_by='uniform'") -> None:
    """Raise ValueError where keys and values have no projections of their own to differentiate by.

    Args:
        reader: what reads these projections.
        instead: what to do without, for the end of the message.
    """
    attention = params["layers"][0].get("attention", {})
    if not all(name in attention for name in PROJECTIONS.values()):
        raise ValueError(f"{reader}: this model's keys and values have no projections of their own (found "
                         f"{', '.join(sorted(attention)) or 'none'}){instead}")


def collect_fisher(
    model: Any, tokens: np.ndarray, progress: bool = False, sums: CheckpointedSums | None = None,
    sample: FisherSample | None = None,
) -> Fisher:
    """Fisher information over windows of tokens, each cut into sequences.

    Layer by layer: forward once, then back through one compiled program that all layers share. What is kept is one
    residual stream for each layer.

    Args:
        model: a `LoadedModel`.
        tokens: int32 `[n, S]`, S >= 2.
        progress: show a progress bar.
        sums: goes on where a run that was killed left them.
        sample: how long sequences are, and how many; `FisherSample()` by default.

    Raises:
        ValueError: projections that are fused, windows too short, or gradients that are not finite (layer named).
    """
    check_projections(model.params)
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(f"tokens: expected [windows, length of at least 2], got {tokens.shape}")
    rows = (sample or FisherSample()).rows(tokens)
    sums = sums or CheckpointedSums(None, {})
    begin = sums.load()
    with ProgressBar("Fisher information", len(rows), progress) as bar:
        bar.advance(begin)
        for index in range(begin, len(rows)):
            for side, found in _of_sequence(model.config, model.params, jnp.asarray(rows[index : index + 1])).items():
                finite = np.isfinite(found).all(axis=(1, 2))
                if not finite.all():
                    raise ValueError(f"Fisher information: the gradient by W_{side[0]} of layer {int(np.argmin(finite))} "
                                     "is not finite")
                sums.add(side, found)
            sums.save(index + 1)
            bar.advance()
    roots = [np.sqrt(sums.arrays[f"{side}_squares"] / len(rows)).mean(axis=(1, 2)) for side in PROJECTIONS]
    return Fisher(sums.arrays["k"] / len(rows), sums.arrays["v"] / len(rows), len(rows), np.stack(roots, axis=-1))


def _of_sequence(config: ModelConfig, params: Any, tokens: jax.Array) -> dict[str, np.ndarray]:
    """Of every layer, float64, by side: G^T G `[L, W, W]`, and as `side_squares` the squares of G `[L, H, W]`."""
    streams = residual_streams(config, params, tokens)
    cotangent = loss_gradient(config, params, streams.pop(), tokens[:, 1:])
    out: dict[str, list[np.ndarray]] = {}
    for own, window, layer in zip(config.by_layer[::-1], config.windows[::-1], params["layers"][::-1], strict=True):
        cotangent, squares = _backward(own, window, layer, streams.pop(), cotangent)
        for name, square in squares.items():
            out.setdefault(name, []).append(to_host(square).astype(np.float64))
    return {side: np.stack(found[::-1]) for side, found in out.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(config: ModelConfig, window: int | None, layer: Any, x: jax.Array, cotangent: jax.Array):
    """Gradient by the layer's input, and of its projections G^T G and the squares of G."""
    kernels = {side: layer["attention"][name]["kernel"] for side, name in PROJECTIONS.items()}
    attend = functools.partial(attend_exactly, config, window)

    def through(x, kernels):
        attention = dict(layer["attention"])
        for side, name in PROJECTIONS.items():
            attention[name] = {**attention[name], "kernel": kernels[side]}
        return jnp.vdot(layer_output(config, {**layer, "attention": attention}, x, attend), cotangent)

    by_x, by_kernels = jax.grad(through, argnums=(0, 1))(x, kernels)

    def square(g):
        g = g.astype(jnp.float32)
        return precise.matmul(g.T, g)

    squares = {f"{side}_squares": jnp.square(g.astype(jnp.float32)) for side, g in by_kernels.items()}
    return by_x, {side: square(g) for side, g in by_kernels.items()} | squares
