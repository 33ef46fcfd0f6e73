"""Tables of a model's cache: how compressible it is, and how a method's bases follow a shift of the text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.calibration.calibrate import collect_moments
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.evals.studies.bases.metrics import (
    principal_basis,
    rank_of_energy,
    residual_energy_ratio,
    second_moment,
    spectrum,
)

# ---- how compressible the cache is


class Kind(NamedTuple):
    """One row of the compressibility table: a tap, per head or all heads jointly, at a share of the width."""

    label: str
    tap: str
    joint: bool
    fraction: float


KINDS = (
    Kind("keys after RoPE, per head", "k", False, 0.5),
    Kind("keys before RoPE, per head", "k_pre", False, 0.5),
    Kind("keys before RoPE, heads jointly", "k_pre", True, 0.25),
    Kind("values, per head", "v", False, 0.5),
    Kind("values, heads jointly", "v", True, 0.5),
)
CROSS_LAYER_TAPS = (("keys before RoPE", "k_pre"), ("values", "v"))


def compressibility_table(
    model: Any, calibration: Moments, tests: dict[str, np.ndarray], layers: int = 5, fraction: float = 0.25,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """How much energy rank-limited bases lose on each text: calibrated ones, and the text's own (the oracle).

    Bases are fitted to keys or values alone, without the queries that a method may add. Rows that work across
    layers have no calibrated basis; each comes with the same share of one layer's heads jointly, to compare.

    Args:
        model: a `LoadedModel`.
        calibration: moments of the calibration corpus.
        tests: name of the text -> int32 tokens `[n, S]`.
        layers: adjacent layers of a group in the cross-layer rows; those left over are not counted.
        fraction: rank of the cross-layer rows, as a share of their width.
        progress: show a progress bar.

    Returns:
        Rows of "kind", "rank", "width", "text", the means "static" and "oracle" over layers and heads (static
        is None where there is none), and lists by layer (or group) and basis, "static_per_layer",
        "oracle_per_layer".
    """
    rows = []
    for text, tokens in tests.items():
        across = _LayerGroups(min(layers, model.config.num_layers))
        moments = collect_moments(model, tokens, progress, across.see)
        rows += [_compressibility(model, kind, text, calibration, moments) for kind in KINDS]
        for label, tap in CROSS_LAYER_TAPS:
            one = Kind(f"{label}, jointly over 1 layer", tap, True, fraction)
            oracle = _compressibility(model, one, text, moments, moments)
            rows.append(oracle | {"static": None, "static_per_layer": None})
            rows.append(across.row(label, tap, text, fraction))
    return rows


def moments_of(moments: Moments, tap: str, joint: bool, kv_heads: int) -> np.ndarray:
    """Second moments `[L, J, W, W]` of a tap, J = 1 for all heads jointly."""
    return getattr(moments, tap)[:, None] if joint else moments.per_head(tap, kv_heads)


def _compressibility(model, kind: Kind, text: str, calibration: Moments, moments: Moments) -> dict[str, Any]:
    heads = model.config.kv_heads
    fitted, tested = (moments_of(m, kind.tap, kind.joint, heads) for m in (calibration, moments))
    rank = max(1, round(kind.fraction * tested.shape[-1]))
    static = residual_energy_ratio(tested, principal_basis(fitted, rank))
    oracle = residual_energy_ratio(tested, principal_basis(tested, rank))
    return _row(kind.label, rank, tested.shape[-1], text, oracle, static)


def _row(label, rank, width, text, oracle, static=None) -> dict[str, Any]:
    return {
        "kind": label, "rank": rank, "width": width, "text": text,
        "static": None if static is None else float(static.mean()), "oracle": float(oracle.mean()),
        "static_per_layer": None if static is None else static.tolist(), "oracle_per_layer": oracle.tolist(),
    }


class _LayerGroups:
    """Second moments of `size` adjacent layers side by side (as xKV decomposes them), fed layer by layer."""

    def __init__(self, size: int):
        self.size = size
        self.sums: dict[tuple[str, int], np.ndarray] = {}
        self.seen: list[Taps] = []

    def see(self, layer: int, taps: Taps) -> None:
        if layer == 0:
            self.seen = []
        self.seen.append(taps)
        # what is left over at the end is too short for a group and not counted
        if len(self.seen) == self.size:
            for _, tap in CROSS_LAYER_TAPS:
                sides = [np.asarray(getattr(t, tap)).reshape(t.v.shape[1], -1) for t in self.seen]
                moment = second_moment(np.concatenate(sides, axis=1))
                self.sums[tap, layer] = self.sums.get((tap, layer), 0.0) + moment
            self.seen = []

    def row(self, label: str, tap: str, text: str, fraction: float) -> dict[str, Any]:
        moments = np.stack([moment for (name, _), moment in self.sums.items() if name == tap])
        rank = max(1, round(fraction * moments.shape[-1]))
        losses = residual_energy_ratio(moments, principal_basis(moments, rank))
        label = f"{label}, jointly over {self.size} layers"
        return _row(label, rank, moments.shape[-1], text, losses[:, None])


def spectra_table(
    model: Any, moments: Moments, energies: Sequence[float] = (0.9, 0.95, 0.99)
) -> list[dict[str, Any]]:
    """Eigenvalue decay of each tap: the spectrum `[L][K][W]` and the ranks `[L][K]` that hold each energy."""
    rows = []
    for tap in ("k", "k_pre", "v"):
        moment = moments_of(moments, tap, False, model.config.kv_heads)
        ranks = {str(energy): rank_of_energy(moment, energy).tolist() for energy in energies}
        decay = spectrum(moment)
        rows.append({"tap": tap, "width": decay.shape[-1], "spectrum": decay.tolist(), "ranks": ranks})
    return rows
