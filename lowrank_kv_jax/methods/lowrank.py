"""What the low-rank methods share: sinks and recent tokens exact, the tokens between them as coefficients."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.codecs.basis import expand_values, fold_query, project, reconstruct
from lowrank_kv_jax.codecs.quantised import TOKEN_BITS, read_tokens
from lowrank_kv_jax.method import KVMethod, Layout, Place
from lowrank_kv_jax.moments import Moments
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.partial import AttnPartial, merge
from lowrank_kv_jax.positions import Runs
from lowrank_kv_jax.rank import rank_for_energy, resolve_rank
from lowrank_kv_jax.rope import rope_angles, rotate
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.segments import exact as exact_tokens
from lowrank_kv_jax.spec import AttentionSpec, Taps
from lowrank_kv_jax.state import leaf, state


class Bases(NamedTuple):
    """Orthonormal bases of one layer: k `[J, W, Rk]`, v `[J', W, Rv]`, or with a leading row axis B."""

    k: jax.Array
    v: jax.Array


@state
class LowRankState:
    """One layer's cache.

    Attributes:
        exact: sinks, recent tokens and those appended since the last refresh.
        coded: the rest, as coefficients.
        k_basis, v_basis: `[B, J, W, R]` where a method moves its basis; None where calibration's bases are read.
    """

    exact: exact_tokens.Exact
    coded: coded_tokens.Coded
    k_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")


@dataclasses.dataclass(frozen=True)
class LowRank(KVMethod):
    """Abstract. Fields common to all low-rank methods.

    Attributes:
        rank: columns of a basis (int), or a fraction of its width (float): D per head, K * D joint.
        rank_k, rank_v: override `rank` for keys or values.
        energy: instead of `rank`: the smallest rank that keeps this share of the calibrated energy in every head of
            the layer (OjaKV, A.2); only for methods whose bases are calibrated.
        rope: "post" codes keys after RoPE and attends in coefficient space; "pre" codes them before (three to five
            times more compressible) and rebuilds and rotates them on read.
        heads: "per_head", or "joint" for one basis over all heads of the layer.
        sinks, recent: exact tokens at both ends.
        recent_of: "ring", the most recent tokens at any time, or "prompt", the prompt's last ones for good.
        decoded: "coded", tokens that leave the recent window are coded too; "exact", whatever is appended after the
            prompt stays exact.
        order: "reduced" attends in coefficient space, "reconstruct" rebuilds keys and values block by block first
            (both orders of OjaKV, A.3; keys coded before RoPE are always rebuilt).
        bits: 8, 4 or 2 quantises the coefficients, a scale for each component of every 128 tokens; None keeps them in
            the cache's dtype.
    """

    rank: int | float | None = 0.5
    rank_k: int | float | None = None
    rank_v: int | float | None = None
    energy: float | None = None
    rope: str = "post"
    heads: str = "per_head"
    sinks: int = 32
    recent: int = 32
    recent_of: str = "ring"
    decoded: str = "coded"
    order: str = "reduced"
    bits: int | None = None

    stage: ClassVar[str | None] = "codec"
    adapts: ClassVar[bool] = False
    """Whether rows own their bases (a prompt-fitted or moving basis)."""

    shared_key_basis: ClassVar[bool] = False
    """Whether the keys of all heads may lie in one basis of a head's width."""

    bases_type: ClassVar[type | None] = Bases

    def __post_init__(self):
        allowed = {
            "rope": ("pre", "post"), "heads": ("per_head", "joint"), "recent_of": ("ring", "prompt"),
            "decoded": ("coded", "exact"), "order": ("reduced", "reconstruct"),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r}: allowed are {', '.join(values)}")
        if self.bits is not None and self.bits not in TOKEN_BITS:
            raise ValueError(f"bits={self.bits!r}: allowed are None, {', '.join(map(str, TOKEN_BITS))}")
        for field in ("sinks", "recent"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)!r}: must be an int of at least 0")
        for field in ("rank", "rank_k", "rank_v"):
            value = getattr(self, field)
            if value is not None:
                resolve_rank(field, value, width=np.iinfo(np.int32).max)
        if self.energy is None and self.rank is None and (self.rank_k is None or self.rank_v is None):
            raise ValueError("rank=None: give rank, or rank_k and rank_v, or energy")
        if self.energy is not None:
            if not self.calibrated:
                raise ValueError(f"energy={self.energy!r}: only methods with calibrated bases choose ranks by energy")
            rank_for_energy(np.ones(1), self.energy)

    # ---- shapes -------------------------------------------------------------------------------------------------

    def basis_heads(self, spec: AttentionSpec) -> int:
        """J, the number of bases of a layer."""
        return 1 if self.heads == "joint" else spec.kv_heads

    def ranks(self, spec: AttentionSpec) -> tuple[int, int]:
        """Ranks of keys and values that the fields ask for."""
        width = spec.kv_heads // self.basis_heads(spec) * spec.head_dim
        fields = (("rank_k", self.rank_k), ("rank_v", self.rank_v))
        named = [("rank", self.rank) if value is None else (field, value) for field, value in fields]
        k, v = (resolve_rank(field, value, width) for field, value in named if value is not None)
        return k, v

    def validate(self, spec: AttentionSpec) -> None:
        if self.energy is None:
            self.ranks(spec)
        if self.rope == "pre" and spec.rope is None:
            raise ValueError("rope='pre': this model has no rotary embedding; use rope='post'")

    def check_bases(self, spec, bases):
        """Heads, width and rank; ranks that `energy` chose may be any."""
        if bases is None:
            return
        heads = self.basis_heads(spec)
        width = spec.kv_heads // heads * spec.head_dim
        for side, rank in zip("kv", self.ranks(spec) if self.energy is None else (None, None), strict=True):
            *_, found_heads, found_width, found = getattr(bases, side).shape
            allowed = (1, heads) if self.shared_key_basis and side == "k" else (heads,)
            if found_heads not in allowed or found_width != width or rank not in (None, found):
                raise ValueError(
                    f"bases.{side} has {found_heads} heads of [{found_width}, {found}]; {self.name} with these settings "
                    f"takes {heads} of [{width}, {rank or 'any rank'}]: calibrate for it"
                )

    # ---- calibration --------------------------------------------------------------------------------------------

    def layer_moments(self, spec: AttentionSpec, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
        """Second moments `[L, J, W, W]` from which bases of keys and values are taken.

        Keys share their basis with the queries of their head, [Q; K] stacked (OjaKV, A.2).
        """
        keys, queries = ("k_pre", "q_pre") if self.rope == "pre" else ("k", "q")
        if self.heads == "per_head":
            k = moments.per_head(keys, spec.kv_heads) + moments.per_head(queries, spec.kv_heads)
            return k, moments.per_head("v", spec.kv_heads)
        k = np.array(getattr(moments, keys))
        for head in range(spec.kv_heads):
            block = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
            k[:, block, block] += getattr(moments, queries)[:, head]
        return k[:, None], moments.v[:, None]

    def fit(self, spec: AttentionSpec, moments: Moments) -> tuple[Any, ...]:
        """Leading eigenvectors of the calibrated second moments, float32, `Bases` per layer."""
        self.validate(spec)
        bases = []
        for layer_k, layer_v in zip(*self.layer_moments(spec, moments), strict=True):
            pair = []
            for side, moment in (("k", layer_k), ("v", layer_v)):
                values, vectors = np.linalg.eigh(moment.astype(np.float64))
                values, vectors = values[..., ::-1], vectors[..., ::-1]
                rank = rank_for_energy(values, self.energy) if self.energy else self.ranks(spec)[side == "v"]
                pair.append(jnp.asarray(vectors[..., :rank], jnp.float32))
            bases.append(Bases(*pair))
        return tuple(bases)

    def fit_key(self, spec: AttentionSpec) -> dict[str, Any]:
        """Methods with the same ranks, RoPE side and heads share their bases, whatever they do with them."""
        key: dict[str, Any] = {"fit": "pca of [q; k] and v", "rope": self.rope, "heads": self.heads}
        if self.energy:
            return key | {"energy": self.energy}
        return key | dict(zip(("rank_k", "rank_v"), self.ranks(spec), strict=True))

    # ---- the contract -------------------------------------------------------------------------------------------

    def starting_bases(self, layout: Layout, bases: Bases | None) -> Bases:
        """Bases `[B, J, W, R]` before anything was seen, for methods that adapt."""
        if bases is not None:
            return Bases(*(jnp.broadcast_to(u[None], (layout.batch, *u.shape)) for u in (bases.k, bases.v)))
        groups = self.basis_heads(layout.spec)
        width = layout.spec.kv_heads // groups * layout.spec.head_dim
        eyes = (jnp.eye(width, rank, dtype=jnp.float32) for rank in self.ranks(layout.spec))
        return Bases(*(jnp.broadcast_to(eye, (layout.batch, groups, *eye.shape)) for eye in eyes))

    def key_heads(self, spec: AttentionSpec, bases: Bases) -> int:
        """Heads of the stored key coefficients."""
        del spec
        return bases.k.shape[-3]

    def init(self, layout: Layout, bases: Bases | None) -> LowRankState:
        spec, dtype = layout.spec, jnp.dtype(layout.dtype)
        start = self.starting_bases(layout, bases) if self.adapts else bases
        assert start is not None
        held = self.sinks + self.recent
        if self.decoded == "coded":
            exact_size, coded_size = held + layout.block, layout.capacity - held
        else:
            exact_size = min(held, layout.prompt) + max(layout.capacity - layout.prompt, layout.block)
            coded_size = layout.prompt - held
        exact = exact_tokens.empty_exact(
            layout.batch, spec.kv_heads, exact_size, spec.head_dim, dtype, gaps=(self.sinks, self._pinned())
        )
        coded = coded_tokens.empty_coded(
            layout.batch, (self.key_heads(spec, start), start.k.shape[-1]), (start.v.shape[-3], start.v.shape[-1]),
            max(coded_size, layout.block), dtype, self.bits,
        )
        return self.empty_state(layout, bases, start, exact, coded)

    def compress(self, layout, bases, state, taps, lengths):
        (tap,) = taps
        state = self.fit_prompt(layout, bases, state, tap, lengths)
        exact = exact_tokens.hold_prompt(state.exact, tap.k, tap.v, lengths, self.sinks, self.recent)
        end = layout.prompt - self.recent
        coded = state.coded
        counts = jnp.maximum(lengths - self.sinks - self.recent, 0)
        positions = self._coded_positions(counts)
        if end > self.sinks:
            keys = tap.k_pre if self.rope == "pre" else tap.k
            k, v = self.encode(bases, state, *(x[:, self.sinks : end] for x in (keys, tap.v)))
            coded = coded_tokens.hold(coded, k, v, counts, positions)
        else:
            coded = dataclasses.replace(coded, positions=positions)
        return dataclasses.replace(state, exact=exact, coded=coded)

    def limit(self, layout, lengths):
        if self.decoded == "coded":
            return super().limit(layout, lengths)
        return exact_tokens.tail_limit(layout, lengths, self.sinks + self.recent)

    def append(self, layout, bases, state, taps, counts, positions, place):
        return dataclasses.replace(state, exact=exact_tokens.append(state.exact, taps.k, taps.v, counts))

    def attend(self, layout, bases, state, q, positions, place):
        spec = layout.spec
        near = exact_tokens.attend(state.exact, q, positions, scale=spec.scale, window=place.window)
        far = self.attend_coded(layout, self.bases_of(bases, state), state, q, positions, place)
        return merge([near, far])

    def attend_coded(
        self, layout: Layout, bases: Bases, state: LowRankState, q: jax.Array, positions: jax.Array, place: Place
    ) -> AttnPartial:
        """Attention over the coefficients; every coded token lies before every query."""
        spec, tokens = layout.spec, coded_tokens.cached_tokens(state.coded)
        common: dict[str, Any] = dict(scale=spec.scale, q_positions=positions, causal=False, window=place.window)
        if self.rope == "post" and self.order == "reduced":
            out, lse = coefficient_attention(fold_query(bases.k, q, spec.kv_heads), tokens, **common)
        else:
            rope = spec.rope if self.rope == "pre" else None
            rebuilt = bases.v if self.order == "reconstruct" else None
            out, lse = rotary_coefficient_attention(
                q, tokens, bases.k, rope=rope, kv_heads=spec.kv_heads, value_basis=rebuilt, **common
            )
            if rebuilt is not None:
                return AttnPartial(out, lse)
        return AttnPartial(expand_values(bases.v, out, spec.kv_heads), lse)

    def refresh(self, layout, bases, state):
        if self.decoded == "exact":
            return state
        keep = self.recent if self.recent_of == "ring" else 0
        exact, flushed = exact_tokens.flush(state.exact, self._pinned(), keep, layout.block)
        k, v = (x.swapaxes(1, 2) for x in (flushed.k, flushed.v))
        if self.rope == "pre" and layout.spec.rope is not None:
            cos, sin = rope_angles(layout.spec.rope, flushed.positions[:, :, None])
            k = rotate(k.astype(jnp.float32), cos, -sin)
        if self.adapts:
            valid = jnp.arange(layout.block)[None] < flushed.counts[:, None]
            state = self.adapt(layout, bases, state, k, v, flushed.positions, valid.astype(jnp.float32))
        coded = coded_tokens.append(state.coded, *self.encode(bases, state, k, v), flushed.counts)
        return dataclasses.replace(state, exact=exact, coded=coded)

    # ---- hooks --------------------------------------------------------------------------------------------------

    def bases_of(self, bases: Bases | None, state: LowRankState) -> Bases:
        """The bases in which the coefficients of `state` are to be read."""
        own = bases if state.k_basis is None or state.v_basis is None else Bases(state.k_basis, state.v_basis)
        assert own is not None
        return own

    def scaled(self, spec: AttentionSpec, bases: Any, q: jax.Array) -> jax.Array:
        """Queries `[B, T, N, D]` as coded tokens are attended to: times whatever factor stands on those logits."""
        del spec, bases
        return q

    def with_gamma(self, spec: AttentionSpec, bases: Any, k: jax.Array) -> jax.Array:
        """Rebuilt keys `[B, K, S, D]` times the factor of `scaled`: what queries without it see."""
        del spec, bases
        return k

    def rebuilt(self, layout: Layout, bases: Bases, state: LowRankState) -> tuple[jax.Array, jax.Array]:
        """What attention sees of the coded tokens: keys (before RoPE where they are coded so) and values, float32
        `[B, K, S, D]`."""
        use, heads = self.bases_of(bases, state), layout.spec.kv_heads
        k, v = (self.rebuild(use, side, read_tokens(getattr(state.coded, side)), heads) for side in ("k", "v"))
        return k, v

    def encode(self, bases: Any, state: LowRankState, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Coefficients `[B, J, T, R]` of keys and values `[B, T, K, D]`."""
        use = self.bases_of(bases, state)
        return project(use.k, k), project(use.v, v)

    def rebuild(self, use: Any, side: str, coefficients: jax.Array, kv_heads: int) -> jax.Array:
        """Keys ("k") or values ("v") `[B, K, T, D]` from coefficients, with what `bases_of` returned."""
        return reconstruct(getattr(use, side), coefficients, kv_heads)

    def empty_state(
        self, layout: Layout, bases: Any, start: Any, exact: exact_tokens.Exact, coded: coded_tokens.Coded
    ) -> LowRankState:
        """The state of a layer before anything was seen, with the `starting_bases`."""
        return LowRankState(exact, coded, *self.own_bases(layout, bases, start))

    def own_bases(self, layout: Layout, bases: Any, start: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """What the state keeps of the `starting_bases`."""
        del bases
        k, v = (u.astype(layout.dtype) for u in start) if self.adapts else (None, None)
        return k, v

    def fit_prompt(self, layout: Layout, bases: Any, state: LowRankState, taps: Taps, lengths: jax.Array) -> LowRankState:
        """Move the state's bases towards a prompt before it is coded."""
        del bases
        if not self.adapts:
            return state
        own = self.prompt_bases(layout, state, taps, lengths)
        return dataclasses.replace(state, k_basis=own.k.astype(layout.dtype), v_basis=own.v.astype(layout.dtype))

    def prompt_bases(self, layout: Layout, state: LowRankState, taps: Taps, lengths: jax.Array) -> Bases:
        """Bases `[B, J, W, R]` for a prompt, orthonormal float32; only asked of methods that adapt."""
        raise NotImplementedError(type(self).__name__)

    def adapt(
        self, layout: Layout, bases: Any, state: LowRankState, k: jax.Array, v: jax.Array, positions: jax.Array,
        weight: jax.Array,
    ) -> LowRankState:
        """Move the state's bases towards flushed tokens `[B, T, K, D]` before they are coded.

        Args:
            positions: of the tokens, int32 `[B, T]`.
            weight: `[B, T]`, 0 where there is no token.
        """
        del layout, bases, k, v, positions, weight
        return state

    def _pinned(self) -> int:
        return self.sinks + (self.recent if self.recent_of == "prompt" or self.decoded == "exact" else 0)

    def _coded_positions(self, counts: jax.Array) -> Runs:
        """Coded tokens start behind the sinks; behind the prompt's own lie its last tokens if those are pinned."""
        zero = jnp.zeros_like(counts)
        after = self.recent if self._pinned() > self.sinks else 0
        start = jnp.stack([zero, counts], axis=1)
        return Runs(start, jnp.stack([zero + self.sinks, zero + after], axis=1))
