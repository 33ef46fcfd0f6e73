"""One budget for all layers: what each of them gets of it on calibration text."""

import numpy as np

from lowrank_kv_jax.storage.state import state, static

STEP = 0.25
"""Shares are multiples of this: layers of equal share also share their compiled programs."""


@state
class LayerShare:
    """What a layer keeps, in units of what a layer keeps on average; without arrays, so that `init` has its shape."""

    share: float = static()


def layer_shares(above: np.ndarray, keep: float) -> tuple[LayerShare, ...]:
    """Shares of a budget that goes to the highest votes of all layers.

    Args:
        above: float64 `[L, E]`, the share of a layer's tokens whose votes exceed each of E rising edges.
        keep: share of all tokens that stays, in (0, 1].

    Returns:
        Of each layer, on average at most 1: shares at the threshold that keeps `keep` of all tokens, in multiples of
        `STEP`; a step at least, and no more than the layer has.
    """
    layers = len(above)
    rising = np.concatenate([np.zeros((layers, 1)), above[:, ::-1], np.ones((layers, 1))], axis=1)
    wanted = np.array([np.interp(keep, rising.mean(0), own) for own in rising]) / keep / STEP
    steps, most = np.maximum(np.floor(wanted), 1), max(int(1 / keep / STEP), 1)
    steps = np.minimum(steps, most)
    while steps.sum() > layers / STEP:  # the step that small layers are given at least is taken from the largest
        steps[np.argmax(steps)] -= 1
    for layer in np.argsort(steps - wanted, kind="stable"):
        if steps.sum() < int(layers / STEP) and steps[layer] < most:
            steps[layer] += 1
    return tuple(LayerShare(float(step * STEP)) for step in steps)
