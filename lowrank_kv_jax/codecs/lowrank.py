"""What the low-rank methods share: sinks and recent tokens exact, the tokens between them as coefficients."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.attention.blockwise import spread_heads
from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import AttentionSpec, Taps
from lowrank_kv_jax.estimators.moments import Moments
from lowrank_kv_jax.estimators.rank import rank_for_energy, resolve_rank
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.codec import Ends, Logits, TokenCodec, Tokens, codes_of
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import rotary_coefficient_attention
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import expand_values, fold_query, project, reconstruct
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.quantised import COEFFICIENTS, TOKEN_BITS, Tile, read_tokens
from lowrank_kv_jax.storage.state import leaf, state


class Bases(NamedTuple):
    """Orthonormal bases of one layer: k `[J, W, Rk]`, v `[J', W, Rv]`, or with a leading row axis B."""

    k: jax.Array
    v: jax.Array


@state
class LowRankStore:
    """One layer's tokens as coefficients.

    Attributes:
        tokens: the coefficients.
        k_basis, v_basis: `[B, J, W, R]` where a method moves its basis; None where calibration's bases are read.
    """

    tokens: coded_tokens.Coded
    k_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")
    v_basis: jax.Array | None = leaf("batch", "kv_heads", "width", "rank", kind="bases")


@dataclasses.dataclass(frozen=True)
class LowRank(TokenCodec):
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

    rebuilds: ClassVar[bool] = True
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

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, pinned=self.recent_of == "prompt", flushes=self.decoded == "coded")

    def exact_ends(self):
        return self.sinks, self.recent

    def units(self, spec, bases):
        return self.starting_shapes(spec, bases)[0][0]

    def empty(self, layout, bases, size, positions=None):
        tokens = coded_tokens.empty_coded(
            layout.batch, *self.starting_shapes(layout.spec, bases), size, jnp.dtype(layout.dtype), self.bits,
            *(tile_for(size, positions),) * 2, positions,
        )
        return LowRankStore(tokens, *self.own_bases(layout, bases))

    def learn(self, layout, bases, store, taps, lengths, weight):
        if not self.adapts:
            return store
        (tap,) = taps
        own = self.prompt_bases(layout, bases, store, tap, lengths, weight)
        return dataclasses.replace(store, k_basis=own.k.astype(layout.dtype), v_basis=own.v.astype(layout.dtype))

    def encode(self, layout, bases, store, tokens):
        return self.coefficients(bases, store, *self.sides(tokens))

    def adapt(self, layout, bases, store, tokens, weight):
        return store

    def decode(self, layout, bases, store, k, v, positions, index):
        use, spec = self.read_in(bases, store, positions), layout.spec
        k, v = (self.rebuild(use, side, x, spec.kv_heads) for side, x in (("k", k), ("v", v)))
        if self.rope == "pre" and spec.rope is not None:
            k = rotate(k, *rope_angles(spec.rope, spread_heads(positions.position, spec.kv_heads)))
        return self.as_seen(spec, bases, k), v

    def attend(self, layout, bases, store, q, positions, place):
        spec, tokens = layout.spec, coded_tokens.cached_tokens(store.tokens)
        q = self.scaled(spec, bases, q)
        common: dict[str, Any] = dict(scale=spec.scale, q_positions=positions, causal=False, window=place.window)
        values = self.bases_of(bases, store).v
        if self.rope == "post" and self.order == "reduced":
            folded = fold_query(self.bases_of(bases, store).k, q, spec.kv_heads)
            out, lse = coefficient_attention(folded, tokens, **common)
            return AttnPartial(expand_values(values, out, spec.kv_heads), lse)
        use = self.read_in(bases, store, tokens.positions)
        out, lse = rotary_coefficient_attention(
            q, tokens, use.k, rope=spec.rope if self.rope == "pre" else None, kv_heads=spec.kv_heads,
            value_basis=use.v if self.order == "reconstruct" else None, **common,
        )
        return AttnPartial(out if self.order == "reconstruct" else expand_values(values, out, spec.kv_heads), lse)

    def logits(self, layout, bases, store, q, place):
        spec, (keys, where) = layout.spec, (store.tokens.k, store.tokens.positions)
        q = self.scaled(spec, bases, q)
        if self.rope == "post" and self.foldable:
            return Logits(fold_query(self.bases_of(bases, store).k, q, spec.kv_heads), keys)
        keys = self.rebuild(self.read_in(bases, store, where), "k", codes_of(store)[0], spec.kv_heads)
        if self.rope == "pre" and spec.rope is not None:
            keys = rotate(keys, *rope_angles(spec.rope, spread_heads(where.position, spec.kv_heads)))
        return Logits(q, keys)

    # ---- hooks --------------------------------------------------------------------------------------------------

    foldable: ClassVar[bool] = True
    """Whether queries fold into the basis of keys that are coded after RoPE."""

    def sides(self, tokens: tuple[Tokens, ...]) -> tuple[jax.Array, jax.Array]:
        """Keys as they are coded and values of the one layer's tokens `[B, T, K, D]`."""
        (one,) = tokens
        return one.k_pre if self.rope == "pre" else one.k, one.v

    def starting_bases(self, spec: AttentionSpec, bases: Any) -> Bases:
        """Bases `[J, W, R]` before anything was seen."""
        if bases is not None:
            return Bases(bases.k, bases.v)
        groups = self.basis_heads(spec)
        width = spec.kv_heads // groups * spec.head_dim
        eyes = (jnp.eye(width, rank, dtype=jnp.float32) for rank in self.ranks(spec))
        return Bases(*(jnp.broadcast_to(eye, (groups, *eye.shape)) for eye in eyes))

    def starting_shapes(self, spec: AttentionSpec, bases: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and rank of stored coefficients, of keys and of values."""
        k, v = self.starting_bases(spec, bases)
        return (k.shape[0], k.shape[-1]), (v.shape[0], v.shape[-1])

    def own_bases(self, layout: Layout, bases: Any) -> tuple[jax.Array | None, jax.Array | None]:
        """What the store keeps of the starting bases, `[B, J, W, R]`, where rows have their own."""
        if not self.adapts:
            return None, None
        start = self.starting_bases(layout.spec, bases)
        k, v = (jnp.broadcast_to(u.astype(layout.dtype), (layout.batch, *u.shape)) for u in start)
        return k, v

    def bases_of(self, bases: Any, store: LowRankStore) -> Any:
        """The bases in which the coefficients of `store` are to be read."""
        own = bases if store.k_basis is None or store.v_basis is None else Bases(store.k_basis, store.v_basis)
        assert own is not None
        return own

    def read_in(self, bases: Any, store: LowRankStore, positions: Runs | PerHead) -> Any:
        """The same for rebuilding; of packed tokens one basis over all heads, of which each slot needs its owner's."""
        use = self.bases_of(bases, store)
        if isinstance(positions, Runs) or positions.owner is None:
            return use
        return use._replace(k=one_below_the_other(use.k), v=one_below_the_other(use.v))

    def rebuilt(self, layout: Layout, bases: Any, store: LowRankStore) -> tuple[jax.Array, jax.Array]:
        """What attention sees of the stored tokens: keys (before RoPE where they are coded so) and values, float32
        `[B, K, S, D]`."""
        use, heads = self.bases_of(bases, store), layout.spec.kv_heads
        k, v = (self.rebuild(use, side, read_tokens(getattr(store.tokens, side)), heads) for side in ("k", "v"))
        return self.as_seen(layout.spec, bases, k), v

    def coefficients(self, bases: Any, store: LowRankStore, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Coefficients `[B, J, T, R]` of keys and values `[B, T, K, D]`."""
        use = self.bases_of(bases, store)
        return project(use.k, k), project(use.v, v)

    def rebuild(self, use: Any, side: str, coefficients: jax.Array, kv_heads: int) -> jax.Array:
        """Keys ("k") or values ("v") `[B, K, T, D]` from coefficients, with what `bases_of` returned."""
        return reconstruct(getattr(use, side), coefficients, kv_heads)

    def scaled(self, spec: AttentionSpec, bases: Any, q: jax.Array) -> jax.Array:
        """Queries `[B, T, N, D]` as they meet the coded keys."""
        del spec, bases
        return q

    def as_seen(self, spec: AttentionSpec, bases: Any, k: jax.Array) -> jax.Array:
        """Rebuilt keys `[B, K, S, D]` as the queries see them."""
        del spec, bases
        return k

    def prompt_bases(
        self, layout: Layout, bases: Any, store: LowRankStore, taps: Taps, lengths: jax.Array, weight: jax.Array
    ) -> Bases:
        """Bases `[B, J, W, R]` for a prompt, orthonormal float32; only asked of codecs that adapt. See `learn`."""
        raise NotImplementedError(type(self).__name__)


def tile_for(size: int, positions: PerHead | None) -> Tile:
    """What shares a scale: no more tokens than a selection keeps."""
    return COEFFICIENTS if positions is None else Tile(min(COEFFICIENTS.tokens, max(size, 1)), COEFFICIENTS.channels)


def one_below_the_other(basis: jax.Array) -> jax.Array:
    """Bases `[J, W, R]` or `[B, J, W, R]` of J heads as one of all heads, `[1, J * W, R]` or `[B, 1, J * W, R]`."""
    return basis.reshape(*basis.shape[:-3], 1, -1, basis.shape[-1])
