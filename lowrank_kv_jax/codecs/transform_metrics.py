"""What an error of a key or value costs: the weights of channels under which transform coding looks for directions and
gives bits."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.estimators.moments import Moments

LEAST_WEIGHT = 1e-2
"""Weights below this share of a head's largest count as much (`attention`)."""
LEAST_SENSITIVITY = 0.05
"""What every channel's sensitivity is raised by, in means of its layer: the mean square of few gradients is uncertain."""
OF_VALUES = 2.0
"""What a squared relative error of values counts under `attention`, in squared errors of logits. By the formula of small
errors of a softmax it would be 1; measured by divergence from the full cache's logits, more is better on prose and code
and worse on needles."""


class Metric(NamedTuple):
    """Weights of channels, and how far the weighted errors of keys and of values compare.

    Attributes:
        k, v: `[L, K, D]`; None stands for 1.
        k_counts, v_counts: what a squared error that is relative to a layer's variance counts; None where weighted
            squared errors are comparable as they are.
    """

    k: np.ndarray | None
    v: np.ndarray | None
    k_counts: float | None
    v_counts: float | None


def plain(spec: AttentionSpec, moments: Moments, tap: str) -> Metric:
    """Relative errors of keys and of values."""
    del moments, tap
    return Metric(None, None, spec.kv_heads, spec.kv_heads)


def attention(spec: AttentionSpec, moments: Moments, tap: str) -> Metric:
    """Errors of logits, and relative errors of values.

    A key's channel weighs the root of its queries' mean square, times the softmax scale; both channels of a RoPE pair the
    same, as they turn into each other. An error d of the logits moves the output of attention by about as much as a
    relative error d of the values: sum_t p_t d_t (v_t - o) and sum_t p_t d_t |v_t|.
    """
    queries = getattr(moments, tap.replace("k", "q"))
    if queries is None:
        raise ValueError(f"metric='attention': these moments hold no queries ({tap.replace('k', 'q')}); calibrate with "
                         "`calibrate`, or give metric=plain")
    square = np.diagonal(np.asarray(queries, np.float64), axis1=2, axis2=3) / (moments.tokens * spec.group_size)
    root = np.sqrt(np.maximum(_of_pairs(spec, square), 0.0))
    most = root.max(axis=-1, keepdims=True)
    weight = spec.scale * np.where(most > 0, np.maximum(root, LEAST_WEIGHT * most), 1.0)
    return Metric(weight, None, None, OF_VALUES * spec.kv_heads)


def loss(spec: AttentionSpec, moments: Moments, tap: str) -> Metric:
    """What errors add to the model's loss, to second order; see `calibration.sensitivity`. After RoPE both channels of a
    pair count the same: further on in a text each is where the other was."""
    found = moments.sensitivity
    if found is None:
        raise ValueError("metric='loss': these moments hold no sensitivity; calibrate with `calibrate`, add that of "
                         "`calibration.sensitivity`, or give metric=attention")
    k, v = getattr(found, tap), found.v
    k = _of_pairs(spec, np.asarray(k, np.float64)) if tap == "k" else k
    mean = (k.mean() + v.mean()) / 2 or 1.0

    def weight(square):
        layer = square.mean(axis=(1, 2), keepdims=True)
        return np.sqrt((square + np.maximum(LEAST_SENSITIVITY * layer, 1e-6 * mean)) / mean)

    return Metric(weight(k), weight(v), None, None)


def _of_pairs(spec: AttentionSpec, square: np.ndarray) -> np.ndarray:
    """Of channels `[L, K, D]`, those of a RoPE pair with their mean."""
    square = square.copy()
    for own, rope in zip(square, spec.each_rope, strict=True):
        if rope is not None:
            half = rope.rotary_dim // 2
            own[:, : 2 * half] = np.tile((own[:, :half] + own[:, half : 2 * half]) / 2, 2)
    return square


METRICS: dict[str, Callable[[AttentionSpec, Moments, str], Metric]] = {
    "loss": loss, "attention": attention, "plain": plain,
}
