"""Online Subspace Projection: coefficients in chunks with bases of their own (papers/online_subspace_projection)."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowrank_kv_jax.codecs.component_bits import uniform_bits
from lowrank_kv_jax.codecs.frame import as_met, as_seen
from lowrank_kv_jax.codecs.osp_chunks import ChunkedStore, Chunks, overlap_of, put_page
from lowrank_kv_jax.codecs.osp_sides import (
    Side,
    as_they_are,
    prior_tokens,
    quarter_turn,
    side_by_side,
    with_quarter_turns,
)
from lowrank_kv_jax.codecs.principal import side_moments
from lowrank_kv_jax.codecs.subspace import Subspace, SubspaceBases, fit_subspaces, subspace_key
from lowrank_kv_jax.estimators import Estimator, make_estimator
from lowrank_kv_jax.method import Layout, register
from lowrank_kv_jax.method.codec import Ends
from lowrank_kv_jax.pallas_kernels.chunked_attention import chunked_attention
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.basis import project
from lowrank_kv_jax.storage.chunk_bases import store_bases
from lowrank_kv_jax.storage.quantised import BASIS_STORAGE, COEFFICIENTS, read_tokens
from lowrank_kv_jax.storage.state import take_tokens


@register("osp")
@dataclasses.dataclass(frozen=True)
class OnlineSubspaceProjection(Subspace):
    """Adaptive subspaces (section 5): tokens are coded in the basis of their chunk, and a new chunk takes a new basis.

    An estimator learns keys and values as they are coded. Where a chunk begins, its basis is taken from what was
    learned of the tokens before it (weighted as a trailing window) and of those after it that are there already, and
    stays. A chunk ends when it is `chunk_length` tokens long, or when the mean relative residual of its last page
    exceeds a threshold; the residual costs nothing, ||x||^2 - ||c||^2. Pages of `min_chunk` tokens are the smallest
    chunks: a basis costs as much as head_dim tokens, which a trigger for each token would spend every few tokens.

    All bases are one array of `chunks` slots. When they are used up, the last basis is kept for all further chunks.

    Attributes:
        chunk_length: L, the most tokens of a chunk.
        min_chunk: tokens of a page; None is half of `chunk_length`, at most 128. `chunk_length` must be a multiple of it.
        chunks: bases that there is room for, C; None is what the capacity needs at `chunk_length` tokens each.
        tau_k, tau_v: thresholds in [0, 1] on the mean relative residual of a page; None never triggers. See
            `lowrank-kv falsify --thresholds` for those of a residual percentile.
        reuse: a chunk keeps the basis before it if that overlaps with the new one by this much in every head
            (Tr(U1^T U2 U2^T U1) / r, in [0, 1]); None always takes the new one.
        window: W, the time constant in tokens of the weight of past tokens; None weighs all alike.
        prior: tokens that calibration counts for when a basis is taken. 0 is the paper's. Post-RoPE keys of the last few
            hundred tokens say little of the next: a trailing window alone loses more than the static basis.
        lookahead: tokens after the start of a chunk that its basis may be learned from, as far as they have been seen:
            all of them in a prompt, `recent` while decoding. 0 is the paper's streaming mode.
        estimator: a name of `estimators.ESTIMATORS`.
        sketch: what it keeps: a multiple of the rank (float), or rows (int), at least the rank.
        rotary: the paper's rotation-aware basis: complex directions of the frequency pairs, which the rotation carries
            along from the chunk's anchor to each token. That is a basis of the keys before RoPE, held to contain i
            times each of its directions. Needs rope="pre" and even ranks.
        basis_dtype: of stored bases, "bfloat16", "float16", "float32", "float8_e4m3fn" or "int8"; None is the cache's.
    """

    chunk_length: int = 512
    min_chunk: int | None = None
    chunks: int | None = None
    tau_k: float | None = None
    tau_v: float | None = None
    reuse: float | None = None
    window: int | None = 64
    prior: float = 64.0
    lookahead: int = 512
    estimator: str = "covariance"
    sketch: int | float = 2.0
    rotary: bool = False
    basis_dtype: str | None = None

    exact_at: ClassVar[Mapping[str, Any] | None] = {"rank": 1.0, "sinks": 4, "recent": 8, "chunk_length": 32}
    small: ClassVar[Mapping[str, Any]] = {"sinks": 4, "recent": 8, "chunk_length": 32}
    per_token: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        for field, least in (("chunk_length", 1), ("min_chunk", 1), ("chunks", 1), ("window", 1), ("lookahead", 0)):
            value = getattr(self, field)
            optional = field in ("min_chunk", "chunks", "window")
            if not (value is None and optional) and (type(value) is not int or value < least):
                raise ValueError(f"{field}={value!r}: must be an int of at least {least}")
        if self.chunk_length % self.page:
            raise ValueError(f"chunk_length={self.chunk_length}: must be a multiple of min_chunk={self.page}")
        if not (math.isfinite(self.prior) and self.prior >= 0):
            raise ValueError(f"prior={self.prior!r}: must be a finite number of at least 0")
        if not self.sketch >= 1:
            raise ValueError(f"sketch={self.sketch!r}: must be at least 1, in rows (int) or times the rank (float)")
        for field in ("tau_k", "tau_v", "reuse"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{field}={value!r}: must lie in [0, 1]")
        if self.basis_dtype not in (None, *BASIS_STORAGE):
            raise ValueError(f"basis_dtype={self.basis_dtype!r}: allowed are None, {', '.join(BASIS_STORAGE)}")
        for field, only in (("order", "reduced"), ("recent_of", "ring"), ("decoded", "coded")):
            if getattr(self, field) != only:
                raise ValueError(f"{field}={getattr(self, field)!r}: {self.name} has {field}={only!r} only")
        if self.rotary and self.rope != "pre":
            raise ValueError(f"rotary=True, rope={self.rope!r}: bases that rotate are of keys before RoPE, rope='pre'")
        make_estimator(self.estimator)

    def basis_heads(self, spec):
        return 1 if self.heads == "joint" else spec.kv_heads

    def fit(self, spec, moments):
        k, v = side_moments(self, spec, moments)
        if self.rotary:
            turn = quarter_turn(k.shape[-1], spec.head_dim)
            k = k + turn.T @ k @ turn
        return fit_subspaces(self, spec, moments, k, v)

    def fit_key(self, spec):
        return subspace_key(self, spec) | ({"rotary": True} if self.rotary else {})

    # ---- shapes -------------------------------------------------------------------------------------------------

    @property
    def page(self) -> int:
        return max(1, min(self.chunk_length // 2, 128)) if self.min_chunk is None else self.min_chunk

    def validate(self, spec):
        self.check_model(spec)
        if self.rotary and any(rope is None or rope.rotary_dim != spec.head_dim for rope in spec.each_rope):
            raise ValueError("rotary=True: this model does not rotate all channels of a head; use rotary=False")
        if self.energy is None:
            for rank in self.ranks(spec):
                self.learner(rank).check_rank(rank, self.width(spec))
                if self.rotary and rank % 2:
                    raise ValueError(f"rank={rank}: rotary=True needs even ranks, a complex direction has two columns")

    def learner(self, rank: int) -> Estimator:
        """The estimator of bases of this rank."""
        size = math.ceil(self.sketch * rank) if isinstance(self.sketch, float) else self.sketch
        if size < rank:
            raise ValueError(f"sketch={self.sketch!r}: keeps {size} directions, fewer than the rank {rank}")
        return make_estimator(self.estimator, size=size)

    def slots(self, layout: Layout) -> int:
        """Slots of coded tokens: whole pages, and whole tiles of quantised ones."""
        unit = self.page if self.bits is None else math.lcm(self.page, COEFFICIENTS.tokens)
        size = max(layout.capacity - self.sinks - self.recent, layout.block, 1)
        return -(-size // unit) * unit

    def most_chunks(self, layout: Layout) -> int:
        """C. Raises ValueError for more chunks than there are pages."""
        pages = self.slots(layout) // self.page
        if self.chunks is None:
            return -(-self.slots(layout) // self.chunk_length)
        if self.chunks > pages:
            raise ValueError(f"chunks={self.chunks}: a capacity of {layout.capacity} tokens has at most {pages} chunks "
                             f"of min_chunk={self.page}")
        return self.chunks

    # ---- the contract -------------------------------------------------------------------------------------------

    def ends(self, layout, bases):
        return Ends(self.sinks, self.recent, ahead=self.recent)

    def empty(self, layout, bases, size, positions=None):
        dtype, size = jnp.dtype(layout.dtype), self.slots(layout)
        tokens = coded_tokens.empty_coded(
            layout.batch, (bases.k.shape[0], bases.k.shape[-1]), (bases.v.shape[0], bases.v.shape[-1]), size, dtype,
            uniform_bits(self.bits),
        )
        room, learned = [], []
        for u, by_rows in ((bases.k, False), (bases.v, True)):
            u = jnp.broadcast_to(u.astype(jnp.float32), (layout.batch, *u.shape))
            none = jnp.zeros((layout.batch, self.most_chunks(layout), *u.shape[1:]), jnp.float32)
            room.append(store_bases(none.at[:, 0].set(u), self.basis_dtype or layout.dtype, by_rows))
            learned.append(self.learner(u.shape[-1]).init(u.shape[:2], u.shape[2], u))
        none = jnp.zeros((layout.batch,), jnp.int32)
        return ChunkedStore(tokens, Chunks(
            *room, *learned, jnp.zeros((layout.batch, size // self.page), jnp.int32), none, none,
            jnp.zeros((layout.batch, 2, bases.k.shape[0]), jnp.float32),
        ))

    def attend(self, layout, bases, store, q, positions, place):
        spec = layout.spec
        return chunked_attention(
            as_met(q, self.gammas(spec, bases)), coded_tokens.cached_tokens(store.tokens), store.chunks.owner,
            store.chunks.k_bases, store.chunks.v_bases, page=self.page, rope=spec.rope if self.rope == "pre" else None,
            kv_heads=spec.kv_heads, **spec.logits, q_positions=positions, window=place.window,
        )

    def rebuilt(self, layout: Layout, bases: SubspaceBases, store: ChunkedStore) -> tuple[jax.Array, jax.Array]:
        """As `LowRank.rebuilt`."""
        heads, dim = layout.spec.kv_heads, layout.spec.head_dim
        sides = ((store.tokens.k, store.chunks.k_bases), (store.tokens.v, store.chunks.v_bases))
        out = []
        for stored, room in sides:
            c = read_tokens(stored)
            c = c.reshape(*c.shape[:2], -1, self.page, c.shape[-1])
            x = jnp.einsum("bjpsr,bpjwr->bjpsw", c, room.take(store.chunks.owner))
            x = x.reshape(*x.shape[:2], -1, heads // x.shape[1], dim).swapaxes(2, 3)
            out.append(x.reshape(len(x), heads, -1, dim))
        return as_seen(out[0], self.gammas(layout.spec, bases)), out[1]

    # ---- coding -------------------------------------------------------------------------------------------------

    def take_in(self, layout, bases, store, tokens, counts, seen, positions=None, of_prompt=False):
        """Page by page, with a new basis wherever a chunk begins, which may look at the tokens behind `counts`."""
        (one,) = tokens
        most = one.k.shape[1] - self.recent
        if positions is not None:
            most = one.k.shape[1]
            store = dataclasses.replace(store, tokens=dataclasses.replace(store.tokens, positions=positions))
            if most <= self.recent:
                return store
        heads = self.basis_heads(layout.spec)
        k, v = (x.swapaxes(1, 2) for x in self.sides(one))
        turn = functools.partial(with_quarter_turns, layout.spec.head_dim) if self.rotary else as_they_are
        sides = (
            Side(side_by_side(k, heads), turn, prior_tokens(bases.k, bases.k_energy)),
            Side(side_by_side(v, heads), as_they_are, prior_tokens(bases.v, bases.v_energy)),
        )

        def step(_, carry):
            chunks, coded, done = carry
            chunks = self._begin(chunks, coded.length, sides, done, counts, seen)
            room = self.page - coded.length % self.page
            take = jnp.clip(counts - done, 0, room)
            chunks, coded = self._code(chunks, coded, sides, done, take)
            return chunks, coded, done + take

        # a row may begin in the middle of a page: one step more than there are pages
        steps = -(-(most + self.page - 1) // self.page)
        chunks, coded, _ = jax.lax.fori_loop(0, steps, step, (store.chunks, store.tokens, jnp.zeros_like(counts)))
        return ChunkedStore(coded, chunks)

    def _begin(self, chunks: Chunks, length, sides, done, counts, seen) -> Chunks:
        """Where a page begins: decide whether a chunk does, and find its basis."""
        begins = (length % self.page == 0) & (done < counts)
        last = self._current(chunks)
        mean = chunks.missed / self.page
        fired = jnp.zeros_like(begins)
        for side, threshold in enumerate((self.tau_k, self.tau_v)):
            if threshold is not None:
                fired = fired | jnp.any(mean[:, side] > threshold, axis=1)
        wanted = begins & ((length == 0) | (length - chunks.begun >= self.chunk_length) | fired)

        def find():
            return tuple(
                self._basis(u.shape[-1], learned, side, done, seen)
                for u, learned, side in zip(last, (chunks.k_learned, chunks.v_learned), sides, strict=True)
            )

        take = wanted & (chunks.used < chunks.k_bases.capacity)
        found = jax.lax.cond(jnp.any(take), find, lambda: last)
        if self.reuse is not None:
            overlap = jnp.stack([overlap_of(u, new) for u, new in zip(last, found, strict=True)])
            take = take & ((length == 0) | jnp.any(overlap < self.reuse, axis=(0, 2)))
        k_bases, v_bases = (
            bases.put(jnp.minimum(chunks.used, bases.capacity - 1), new, take)
            for bases, new in zip((chunks.k_bases, chunks.v_bases), found, strict=True)
        )
        used = chunks.used + take
        return Chunks(
            k_bases, v_bases, chunks.k_learned, chunks.v_learned,
            put_page(chunks.owner, length // self.page, jnp.maximum(used - 1, 0), begins), used,
            jnp.where(wanted, length, chunks.begun), jnp.where(begins[:, None, None], 0.0, chunks.missed),
        )

    def _basis(self, rank: int, learned: Any, side: Side, done: jax.Array, seen: jax.Array) -> jax.Array:
        """What was learned, the tokens ahead and calibration, as a basis `[B, J, W, R]`."""
        ahead, learner = min(self.lookahead, side.x.shape[2]), self.learner(rank)
        if ahead:
            weight = (done[:, None] + jnp.arange(ahead)[None] < seen[:, None]).astype(jnp.float32)
            learned = learner.update(learned, *side.turned(take_tokens(side.x, done, ahead), weight[:, None]))
        if self.prior:
            prior = jnp.broadcast_to(side.prior, (side.x.shape[0], *side.prior.shape))
            learned = learner.update(learned, *side.turned(prior, jnp.full(prior.shape[:-1], self.prior)))
        return learner.basis(learned, rank)

    def _code(self, chunks: Chunks, coded: coded_tokens.Coded, sides, done, take):
        """Code the next `take` tokens of each row, at most to the end of its page, and learn them."""
        width = min(self.page, sides[0].x.shape[2])
        slots = jnp.arange(width)[None]
        valid = (slots < take[:, None])[:, None].astype(jnp.float32)
        codes, missed, learned = [], [], []
        for u, side, known in zip(
            self._current(chunks), sides, (chunks.k_learned, chunks.v_learned), strict=True
        ):
            x = take_tokens(side.x, done, width).astype(jnp.float32) * valid[..., None]
            c = project(u, x.swapaxes(1, 2))
            codes.append(c)
            total = jnp.sum(x * x, axis=-1)
            left = jnp.maximum(total - jnp.sum(c * c, axis=-1), 0.0)
            missed.append(jnp.sum(jnp.sqrt(left / jnp.where(total > 0, total, 1.0)), axis=-1))
            learner, weight = self.learner(u.shape[-1]), valid
            if self.window is not None:
                known = learner.forget(known, jnp.exp(-take / self.window)[:, None])
                weight = valid * jnp.exp(-(take[:, None] - 1 - slots) / self.window)[:, None]
            learned.append(learner.update(known, *side.turned(x, weight)))
        chunks = dataclasses.replace(
            chunks, k_learned=learned[0], v_learned=learned[1], missed=chunks.missed + jnp.stack(missed, axis=1)
        )
        return chunks, coded_tokens.append(coded, *codes, take)

    def _current(self, chunks: Chunks) -> tuple[jax.Array, jax.Array]:
        """The newest bases as they are stored, `[B, J, W, R]`."""
        index = jnp.maximum(chunks.used - 1, 0)[:, None]
        return chunks.k_bases.take(index)[:, 0], chunks.v_bases.take(index)[:, 0]
