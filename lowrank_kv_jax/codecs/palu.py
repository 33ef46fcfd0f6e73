"""Palu: static low-rank projections of groups of heads, cached before RoPE (Chang et al., ICLR 2025)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.codecs.component_bits import by_component, check_widths, mean_bits
from lowrank_kv_jax.codecs.frame import Frame
from lowrank_kv_jax.codecs.lowrank import LowRank
from lowrank_kv_jax.codecs.principal import check_shapes
from lowrank_kv_jax.codecs.widths import Widths, with_restored_widths, with_saved_widths
from lowrank_kv_jax.estimators.moments import Fisher, Moments, head_blocks
from lowrank_kv_jax.estimators.rank import rank_for_energy
from lowrank_kv_jax.estimators.rank_allocation import allocate_ranks, nearest_ranks
from lowrank_kv_jax.estimators.whitening import truncate
from lowrank_kv_jax.method import register

RANK_BY = ("uniform", "fisher", "fisher-sqrt", "fisher-roots")
MEAN_PAYS = 0.05
"""Share of the truncation loss that means must save for `mean=None` to keep them."""
SIDES = ("k", "v")


class PaluBases(NamedTuple):
    """Of one layer.

    Attributes:
        k, v: decoders, orthonormal `[J, W, R]`; the encoder is the same matrix.
        k_mean, v_mean: `[K, D]`, taken off before coding; None where there are none.
        k_tail, v_tail: last columns that a sequence learned, carried over to the next one: `[J, W, p]`, or
            `[1, J W, J p]` where they were learned jointly.
        k_scale, v_scale: standard deviations of the latents `[J, R]` where components have bits of their own; None
            otherwise.
        k_zero, v_zero: their means.
        widths: bits of the components.
    """

    k: jax.Array
    v: jax.Array
    k_mean: jax.Array | None = None
    v_mean: jax.Array | None = None
    k_tail: jax.Array | None = None
    v_tail: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    k_zero: jax.Array | None = None
    v_zero: jax.Array | None = None
    widths: Widths | None = None

    def saved(self) -> dict[str, jax.Array]:
        """As arrays by name."""
        return with_saved_widths(self)

    @classmethod
    def restored(cls, arrays: dict[str, jax.Array]) -> "PaluBases":
        """What `saved` returned."""
        return cls(**dict.fromkeys(cls._fields) | with_restored_widths(arrays))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class GroupedProjections(LowRank):
    """Abstract. Latents of groups of heads in calibrated bases.

    The projections W_k, W_v ~ A B that Palu puts in the place of the weights are an encoder and a decoder of the taps
    k_pre and v here, so that the model needs no special case. Nothing is lost by that: x W V V^T is the truncation of
    W whitened by x's second moment, with V the principal directions of x W itself (`estimators.whitening`, tested), so
    calibration records no hidden states. The latent is x W V = x A. What a bias adds to x W is the affine mean. Behind
    Qwen3's norm of the keys there is no factor of W_k any more: the normed keys are coded, which is what RoPE reads.

    Attributes:
        head_group: kv heads that share a latent: 1 is M-LRD, all kv heads J-LRD, a divisor between them G-LRD. None is
            the largest divisor up to 4 (the paper's group size).
        rank_by: "uniform"; or ranks in proportion to the Fisher information of each layer's W_k and W_v ("fisher"), or
            to its root ("fisher-sqrt"), whose mean over all of them is the rank asked for; or as Palu's code does, to
            the mean over a matrix' entries of the roots of theirs ("fisher-roots"), rounded to the nearest multiple, so
            that the mean is near the rank asked for.
        rank_multiple: of all ranks that Fisher information decides.
        mean: code around the calibrated mean token (Qwen2's bias); None decides by whether it saves at least 5% of the
            truncation loss.
        hadamard: turn each latent by Hadamard blocks, which spreads outliers over the components of a scale before they
            are quantised (`bits`); without `bits` nothing changes.
    """

    rope: str = "pre"
    head_group: int | None = None
    rank_by: str = "uniform"
    rank_multiple: int = 8
    mean: bool | None = None
    hadamard: bool = False

    calibrated: ClassVar[bool] = True
    bases_type: ClassVar[type | None] = PaluBases
    without: ClassVar[Mapping[str, str]] = {"fisher": "rank_by=uniform"}
    projects: ClassVar[bool] = True
    foldable: ClassVar[bool] = False  # rebuilt keys may have a mean

    def __post_init__(self):
        super().__post_init__()
        if self.rank_by not in RANK_BY:
            raise ValueError(f"rank_by={self.rank_by!r}: allowed are {', '.join(RANK_BY)}")
        if self.heads != "per_head":
            raise ValueError(f"heads={self.heads!r}: give head_group, 1 for each head alone, all kv heads for joint")
        for field in ("rank_multiple", "head_group"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{field}={value!r}: must be an int of at least 1")
        if self.energy is not None and self.rank_by != "uniform":
            raise ValueError(f"rank_by={self.rank_by!r}: not together with energy, which chooses ranks itself")

    # ---- shapes -------------------------------------------------------------------------------------------------

    def group_of(self, spec: AttentionSpec) -> int:
        """Kv heads that share a latent."""
        if self.head_group is None:
            return max(g for g in range(1, min(4, spec.kv_heads) + 1) if spec.kv_heads % g == 0)
        return self.head_group

    def basis_heads(self, spec):
        return spec.kv_heads // self.group_of(spec)

    def check_bases(self, spec, bases):
        check_shapes(self, spec, bases, any_rank=self.by_fisher)
        if bases is not None:
            check_widths(self, bases, mean_bits(self.bits))

    def validate(self, spec):
        group = self.group_of(spec)
        if spec.kv_heads % group:
            fit = [g for g in range(1, spec.kv_heads + 1) if spec.kv_heads % g == 0]
            raise ValueError(f"head_group={group}: must divide the model's {spec.kv_heads} kv heads: "
                             f"{', '.join(map(str, fit))}")
        self.check_model(spec)
        if self.by_fisher:
            self._rank_table(spec, np.ones((spec.num_layers, 2)))
        if self.hadamard and self.energy is None:
            for rank in self.ranks(spec):
                hadamard_blocks(rank)

    # ---- calibration --------------------------------------------------------------------------------------------

    @property
    def by_fisher(self) -> bool:
        """Whether Fisher information decides the ranks."""
        return self.rank_by != "uniform"

    @property
    def reads(self):
        return super().reads | ({"fisher"} if self.by_fisher else set())

    def fit(self, spec: AttentionSpec, moments: Moments) -> tuple[PaluBases, ...]:
        """Truncations of each layer's groups, float32.

        Raises:
            ValueError: a calibration that is singular at the ranks asked for, not finite, or without the Fisher
                information that `rank_by` reads; layer and tap are named.
        """
        self.validate(spec)
        information = None
        if self.by_fisher:
            if moments.fisher is None:
                raise ValueError(f"rank_by={self.rank_by!r}: these moments hold no Fisher information; calibrate with "
                                 "`calibrate`, or add that of `fisher.collect_fisher`")
            information = self._importance(moments.fisher)
        table = self._rank_table(spec, information)
        groups, taps = self.basis_heads(spec), {"k": "k_pre" if self.rope == "pre" else "k", "v": "v"}
        moment = {side: getattr(moments, tap) / moments.tokens for side, tap in taps.items()}
        mean = {side: moments.mean(tap) for side, tap in taps.items()}
        centred = {side: moment[side] - mean[side][:, :, None] * mean[side][:, None] for side in SIDES}
        sides = {side: [taps[side], head_blocks(moment[side], groups), table] for side in SIDES}
        around = {side: [taps[side], head_blocks(centred[side], groups), table] for side in SIDES}
        with_means = self.mean
        if with_means is None:
            energy = {side: float(np.trace(moment[side], axis1=1, axis2=2).sum()) for side in SIDES}
            with_means = self._loss(around, energy) < (1 - MEAN_PAYS) * self._loss(sides, energy)
        fitted = self._decoders(around if with_means else sides)
        out = []
        for layer, decoders in enumerate(fitted):
            means = tuple(jnp.asarray(mean[side][layer].reshape(spec.kv_heads, -1), jnp.float32) for side in SIDES)
            out.append(PaluBases(*decoders, *(means if with_means else (None, None))))
        bits = mean_bits(self.bits)
        return tuple(out) if bits is None else by_component(self, spec, moments, out, bits)

    def _importance(self, fisher: Fisher) -> np.ndarray:
        """Of the matrices `[L, 2]`, what their ranks are in proportion to."""
        if self.rank_by == "fisher-roots":
            if fisher.roots is None:
                raise ValueError(f"rank_by={self.rank_by!r}: this Fisher information has no roots of single entries; "
                                 "collect it with `fisher.collect_fisher`")
            return fisher.roots
        return np.sqrt(fisher.information) if self.rank_by == "fisher-sqrt" else fisher.information

    def _rank_table(self, spec: AttentionSpec, information: np.ndarray | None) -> np.ndarray | None:
        """Ranks `[L, 2]` of keys and values; None where `energy` decides."""
        if self.energy is not None:
            return None
        uniform = np.tile(self.ranks(spec), (spec.num_layers, 1))
        if information is None:
            return uniform
        width = self.width(spec)
        if (uniform == width).all():
            return uniform
        if self.rank_by == "fisher-roots":
            groups = self.basis_heads(spec)
            return nearest_ranks(information, groups * int(uniform.sum()), self.rank_multiple, width, groups)
        return allocate_ranks(information, int(uniform.sum()), self.rank_multiple, width)

    def _rank_of(self, values: np.ndarray, table: np.ndarray | None, layer: int, side: str) -> int:
        """Rank of a layer whose groups have these eigenvalues `[J, W]`, descending."""
        if table is None:
            assert self.energy is not None
            return rank_for_energy(values, self.energy)
        return int(table[layer, SIDES.index(side)])

    def _loss(self, sides: dict[str, Any], energy: dict[str, float]) -> float:
        """Share of the `energy` of keys that all truncations lose, and of values, added."""
        total = 0.0
        for side, (_, blocks, table) in sides.items():
            values = np.linalg.eigvalsh(blocks)[..., ::-1]
            lost = [value[:, self._rank_of(value, table, layer, side) :].sum() for layer, value in enumerate(values)]
            total += float(np.sum(lost)) / max(energy[side], np.finfo(np.float64).tiny)
        return total

    def _decoders(self, sides: dict[str, Any]) -> list[list[jax.Array]]:
        """Of each layer the decoders `[J, W, R]` of keys and values."""
        layers = len(sides["k"][1])
        out: list[list[jax.Array]] = [[] for _ in range(layers)]
        for side, (tap, blocks, table) in sides.items():
            for layer in range(layers):
                values = np.linalg.eigvalsh(blocks[layer])[..., ::-1] if table is None else np.empty(0)
                rank = self._rank_of(values, table, layer, side)
                turn = hadamard_blocks(rank) if self.hadamard else np.eye(rank)
                found = [truncate(block, rank, f"tap {tap!r} in layer {layer}") @ turn for block in blocks[layer]]
                out[layer].append(jnp.asarray(np.stack(found), jnp.float32))
        return out

    def fit_key(self, spec):
        key: dict[str, Any] = {
            "fit": "palu", "rope": self.rope, "head_group": self.group_of(spec), "rank_by": self.rank_by,
            "mean": self.mean, "hadamard": self.hadamard,
        }
        if self.by_fisher:
            key["rank_multiple"] = self.rank_multiple
        return key | self.rank_key(spec)


@register("palu")
@dataclasses.dataclass(frozen=True)
class Palu(GroupedProjections):
    """Whitened truncations of W_k and W_v, fixed after calibration.

    The preset `palu:paper` keeps no token exact and takes ranks by the rule of the paper's code, all groups of a layer
    alike. The prompt attends exactly here, in the paper through the projections.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"sinks": 0, "recent": 0, "rank_by": "fisher-roots", "rank_multiple": 32}
    }

    def frame(self, spec, bases, store):
        return Frame(bases.k, bases.v, bases.k_mean, bases.v_mean)

    def empty(self, layout, bases, size, positions=None):
        return self.empty_store(layout, bases, size, positions)

    def learn(self, layout, bases, store, taps, lengths, weight):
        return self.with_steps_of(layout, bases, store, taps, weight)


def hadamard_blocks(rank: int) -> np.ndarray:
    """Orthogonal `[R, R]`: normalised Hadamard matrices of the largest power of two that divides R on the diagonal.

    Raises:
        ValueError: an odd rank.
    """
    size = rank & -rank
    if size < 2:
        raise ValueError(f"hadamard: rank {rank} is odd, there is no Hadamard matrix; choose an even rank")
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), block)
    return np.kron(np.eye(rank // size), block / np.sqrt(size))
